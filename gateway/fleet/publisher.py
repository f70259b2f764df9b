"""Keeps the routes file true to what the workers' states are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.fleet.commands import Slot
from gateway.fleet.state import Routes, RoutesFile, Target, TargetState, read_routes, write_routes
from gateway.fleet.unit import UnitState, UnitStatus

log = logging.getLogger(__name__)

_TARGET_STATES: dict[UnitState, TargetState] = {
    "waiting": "starting",
    "starting": "starting",
    "ready": "ready",
    "draining": "draining",
    "backoff": "down",
    "failed": "down",
    "stopping": "draining",
    "stopped": "down",
}


class Publisher:
    """The one writer of the routes file. Epochs go on from what is on disk, so they grow over restarts."""

    def __init__(self, path: Path, slots: Sequence[Slot]) -> None:
        self._path = path
        before = _read_or_empty(path)
        self._epoch = before.epoch
        self._models: dict[str, Routes] = {}
        self._model_of: dict[str, str] = {}
        self._written: tuple[int, int] | None = _identity(path)  # the file as we left it; None: to be written
        self._complaint = ""
        for slot in slots:
            entry = slot.entry
            self._model_of[slot.name] = entry.name
            epoch = before.models[entry.name].epoch if entry.name in before.models else 0
            self._models[entry.name] = Routes(model=entry.name, epoch=epoch, aliases=entry.aliases)

    @property
    def epoch(self) -> int:
        return self._epoch

    def update(self, status: UnitStatus, address: str) -> None:
        """Notes a worker's state; writes only when its target changed."""
        target = Target(
            slot=status.slot,
            generation=status.generation,
            address=address,
            state=_TARGET_STATES[status.state],
            restarts=status.restarts,
        )
        model = self._model_of[status.slot]
        routes = self._models[model]
        if target in routes.targets:
            return
        others = {other.slot: other for other in routes.targets} | {target.slot: target}
        self._models[model] = msgspec.structs.replace(
            routes, epoch=routes.epoch + 1, targets=tuple(others.values())
        )
        self._epoch += 1
        self._written = None
        self.flush()

    def flush(self) -> None:
        """Writes what is not on disk yet, or no longer (a file deleted or replaced by someone else); after a
        failure (a full disk) the next call tries again."""
        if self._written is not None and self._written == _identity(self._path):
            return
        try:
            write_routes(self._path, RoutesFile(epoch=self._epoch, models=self._models))
            self._written = _identity(self._path)
            self._complaint = ""
        except OSError as error:
            complaint = f"{self._path} can't be written ({error.strerror}); gateways keep what they have"
            if complaint != self._complaint:  # it may last: say it once
                log.error("%s", complaint)
            self._complaint = complaint


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells one version of the file from the next; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_or_empty(path: Path) -> RoutesFile:
    try:
        return read_routes(path)
    except msgspec.MsgspecError:  # not ours or from another version: it is replaced
        return RoutesFile()
