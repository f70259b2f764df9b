"""Keeps the routes file true to what the workers' states are, and to how a model's users are split."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.fleet.commands import Slot
from gateway.fleet.errors import InvalidFleet
from gateway.fleet.state import (
    FULL_WEIGHT,
    Routes,
    RoutesFile,
    Target,
    TargetState,
    read_routes,
    write_routes,
)
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


@dataclass(frozen=True)
class Split:
    """How a model's users are split: `weights` are basis points by variant, in the order in which the
    document is to have their targets: the primary's first, the standby's last. `hold`: nobody has weight, and
    gateways keep requests waiting. `salt`: of the hash that splits; a new one with each rollout."""

    weights: Mapping[str, int] = field(default_factory=lambda: {"": FULL_WEIGHT})
    hold: bool = False
    rollout_id: str | None = None
    salt: str = ""


@dataclass
class _Model:
    """What is known of a model; `targets` by slot. Its `epoch` grows with each change."""

    routes: Routes
    split: Split = Split()
    targets: dict[str, Target] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)


class Publisher:
    """The one writer of the routes file. Epochs go on from what is on disk, so they grow over restarts, and
    never from below `least`, which gateways already had: where the file was lost, a gateway that outlived it
    would else seem to have applied what it hasn't read.

    `place` makes a slot known before `update` may report on it; models stay, without targets, until `forget`.
    """

    def __init__(self, path: Path, slots: Iterable[Slot] = (), least: int = 0) -> None:
        self._path = path
        self._before = _read_or_empty(path)
        self._epoch = max(self._before.epoch, least)
        self._models: dict[str, _Model] = {}
        self._slots: dict[str, Slot] = {}
        self._written: tuple[int, int] | None = _identity(path)  # the file as we left it; None: to be written
        self._complaint = ""
        self._is_held = False
        for slot in slots:
            self.place(slot)

    @property
    def epoch(self) -> int:
        return self._epoch

    def routes(self, model: str) -> Routes:
        """A model's document as it is published; KeyError when there is none."""
        return self._models[model].routes

    def place(self, slot: Slot) -> None:
        """The slot belongs to this model and variant, from its first `update` on."""
        self._slots[slot.name] = slot
        entry = slot.entry
        if entry.name not in self._models:
            before = self._before.models.get(entry.name)
            epoch = before.epoch if before is not None else 0
            self._models[entry.name] = _Model(Routes(model=entry.name, epoch=epoch, aliases=entry.aliases))
        elif self._models[entry.name].routes.aliases != entry.aliases:
            model = self._models[entry.name]
            self._change(model, msgspec.structs.replace(model.routes, aliases=entry.aliases))

    def drop(self, slot: str) -> None:
        """The slot is empty: its target goes."""
        known = self._slots.pop(slot, None)
        if known is not None:
            model = self._models[known.entry.name]
            model.targets.pop(slot, None)
            model.withheld.discard(slot)
            self._publish(model)

    def withhold(self, slots: Iterable[str]) -> int:
        """These get no new requests, whatever weight their variant has, until they are dropped. Returns the
        file's epoch from which on that holds."""
        for slot in slots:
            if slot in self._slots:
                model = self._models[self._slots[slot].entry.name]
                model.withheld.add(slot)
                self._publish(model)
        return self._epoch

    def retire(self, name: str) -> int:
        """The model is no longer found, but still there. Returns the epoch from which on that holds."""
        model = self._models[name]
        self._change(model, msgspec.structs.replace(model.routes, retired=True))
        return self._epoch

    def forget(self, name: str) -> None:
        """The model is no longer configured; its slots are empty already."""
        if self._models.pop(name, None) is not None:
            self._epoch += 1
            self._written = None
            self.flush()

    def update(self, status: UnitStatus, address: str) -> None:
        """Notes a worker's state; writes only when its target changed."""
        slot = self._slots[status.slot]
        model = self._models[slot.entry.name]
        model.targets[status.slot] = Target(
            slot=status.slot,
            generation=status.generation,
            address=address,
            state=_TARGET_STATES[status.state],
            restarts=status.restarts,
            variant=slot.variant,
        )
        self._publish(model)

    def split(self, name: str, split: Split) -> int:
        """Sets how the model's users are split. Returns the file's epoch from which on that holds."""
        model = self._models[name]
        model.split = split
        self._publish(model)
        return self._epoch

    def _publish(self, model: _Model) -> None:
        split = model.split
        routes = msgspec.structs.replace(
            model.routes,
            targets=tuple(
                msgspec.structs.replace(target, weight_bp=0) if target.slot in model.withheld else target
                for target in _weighted(list(model.targets.values()), split.weights)
            ),
            hold=split.hold,
            rollout_id=split.rollout_id,
            salt=split.salt,
        )
        if routes != model.routes:
            self._change(model, routes)

    def _change(self, model: _Model, routes: Routes) -> None:
        model.routes = msgspec.structs.replace(routes, epoch=routes.epoch + 1)
        self._epoch += 1
        self._written = None
        self.flush()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What changes meanwhile is written at the end, as one: gateways never see it half done."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.flush()

    def flush(self) -> None:
        """Writes what is not on disk yet, or no longer (a file deleted or replaced by someone else); after a
        failure (a full disk) the next call tries again."""
        if self._is_held or (self._written is not None and self._written == _identity(self._path)):
            return
        models = {name: model.routes for name, model in self._models.items()}
        try:
            write_routes(self._path, RoutesFile(epoch=self._epoch, models=models))
            self._written = _identity(self._path)
            self._complaint = ""
        except OSError as error:
            complaint = f"{self._path} can't be written ({error.strerror}); gateways keep what they have"
            if complaint != self._complaint:  # it may last: say it once
                log.error("%s", complaint)
            self._complaint = complaint


def _weighted(targets: list[Target], weights: Mapping[str, int]) -> list[Target]:
    """The targets in the document's order. A variant that has all users gives each replica the full weight;
    else its replicas share the variant's, those that are ready before those that aren't."""
    order = {variant: place for place, variant in enumerate(weights)}
    weighted: list[Target] = []
    for variant in sorted({target.variant for target in targets}, key=lambda one: order.get(one, len(order))):
        replicas = sorted(
            (target for target in targets if target.variant == variant),
            key=lambda one: (len(one.slot), one.slot),
        )
        shares = _shares(replicas, weights.get(variant, 0))
        weighted += [
            msgspec.structs.replace(one, weight_bp=share) for one, share in zip(replicas, shares, strict=True)
        ]
    return weighted


def _shares(replicas: list[Target], weight: int) -> list[int]:
    if weight == FULL_WEIGHT:
        return [weight] * len(replicas)
    ready = sum(target.state == "ready" for target in replicas)
    parts = iter(_parts(weight, ready))
    return [next(parts) if target.state == "ready" else 0 for target in replicas]


def _parts(weight: int, count: int) -> list[int]:
    """`weight` as `count` whole numbers that differ by 1 at most."""
    return [weight * (i + 1) // count - weight * i // count for i in range(count)]


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
    except ValueError:  # not ours or from another version: it is replaced
        return RoutesFile()
    except OSError as error:
        raise InvalidFleet(f"{path} can't be read ({error.strerror}); move it away") from None
