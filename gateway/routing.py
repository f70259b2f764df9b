"""Model name → worker. The table comes from the routes file and is replaced as a whole; a claim never awaits.

The file is polled off the hot path. A table that wasn't looked at for `STALE_AFTER` seconds (the process
was paused) is read again before a claim, so an old route can't be used after the supervisor has stopped
waiting for this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from contracts.errors import ApiError, model_not_found
from gateway.errors import model_starting, model_unavailable
from gateway.fleet.state import FULL_WEIGHT, Routes, RoutesFile, Target
from gateway.upstream import parse_address

POLL_EVERY = 0.2
STALE_AFTER = 2.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Backend:
    """A target and the requests on it. Lives as long as the target is in the table or has requests."""

    model: str
    target: Target
    inflight: int = 0
    label: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.label = self.target.id.encode("latin-1", "replace")

    def release(self) -> None:
        self.inflight -= 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the table. `live`: ready targets with a weight, in the document's order."""

    routes: Routes
    live: tuple[Backend, ...]


class Table:
    """Everything decided by one version of the routes file."""

    def __init__(self, file: RoutesFile, backends: Mapping[tuple[str, str], Backend]) -> None:
        self.epoch = file.epoch
        self.backends: dict[tuple[str, str], Backend] = {}
        self.entries: dict[str, Entry] = {}
        self.names: dict[str, str] = {}
        for model, routes in file.models.items():
            live = []
            for target in routes.targets:
                parse_address(target.address)
                if target.weight_bp < 0:
                    raise ValueError(f"weight_bp of {target.id} is negative")
                key = (model, target.id)
                backend = backends.get(key) or Backend(model, target)
                backend.target = target
                self.backends[key] = backend
                if target.state == "ready" and target.weight_bp > 0:
                    live.append(backend)
            self.entries[model] = Entry(routes, tuple(live))
        for model, routes in file.models.items():
            for alias in routes.aliases:
                self.names.setdefault(alias, model)
        self.names.update((model, model) for model in file.models)
        for key, backend in backends.items():
            if backend.inflight:
                self.backends.setdefault(key, backend)

    @property
    def addresses(self) -> set[str]:
        return {backend.target.address for backend in self.backends.values()}


class Router:
    """Routes of the file `path`. `configured`: model name → aliases, known before they have a route."""

    def __init__(
        self,
        path: Path,
        configured: Mapping[str, Iterable[str]],
        on_change: Callable[[Table], None] = lambda table: None,
    ) -> None:
        self._path = path
        self._configured = {name: tuple(aliases) for name, aliases in configured.items()}
        self._names = {alias: name for name, aliases in self._configured.items() for alias in aliases}
        self._names.update((name, name) for name in self._configured)
        self._on_change = on_change
        self._signature: tuple[int, int, int] | None = None
        self._turn = 0
        self._checked_at = 0.0
        self.table = Table(RoutesFile(), {})
        self.refresh()

    # --- the table

    def refresh(self) -> None:
        """Reads the routes file if it was replaced. One that can't be used changes nothing but the log."""
        self._checked_at = time.monotonic()
        try:
            status = os.stat(self._path)
            signature = (status.st_mtime_ns, status.st_ino, status.st_size)
        except OSError as error:
            self._complain((0, 0, 0), f"can't be read ({error.strerror})")
            return
        if signature == self._signature:
            return
        try:
            table = Table(msgspec.json.decode(self._path.read_bytes(), type=RoutesFile), self.table.backends)
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            self._complain(signature, f"can't be used ({error})")
            return
        self._signature = signature
        self.table = table
        log.info("routes: epoch %d, %d models", table.epoch, len(table.entries))
        self._on_change(table)

    def _complain(self, signature: tuple[int, int, int], what: str) -> None:
        if signature != self._signature:
            self._signature = signature
            log.warning("routes file %s %s; keeping epoch %d", self._path, what, self.table.epoch)

    async def poll(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(POLL_EVERY)
            self.refresh()

    # --- claims

    def resolve(self, name: str) -> str:
        """The model behind a name or alias; ApiError 404 when there is none."""
        model = self.table.names.get(name) or self._names.get(name)
        if model is None:
            raise model_not_found(name)
        return model

    def claim(self, model: str, user: str, tried: Collection[str] = ()) -> Backend:
        """Picks a worker of a resolved model and counts the request on it in one step; `release` uncounts it.

        `tried`: ids of targets that already refused this request. ApiError 503 when no other one is ready.
        """
        if time.monotonic() - self._checked_at > STALE_AFTER:
            self.refresh()
        entry = self.table.entries.get(model)
        live = entry.live if entry is not None else ()
        if tried:
            live = tuple(backend for backend in live if backend.target.id not in tried)
        if not live or entry is None:
            raise self._unavailable(model, entry)
        if len(live) == 1:
            backend = live[0]
        elif entry.routes.rollout_id is None:
            backend = self._least_busy(live)
        else:
            backend = sticky(live, entry.routes.salt, entry.routes.model, user)
        backend.inflight += 1
        return backend

    def _least_busy(self, live: tuple[Backend, ...]) -> Backend:
        self._turn += 1
        start = self._turn % len(live)  # else the first of equals would get every request of a quiet model
        return min(
            live[start:] + live[:start], key=lambda backend: (backend.inflight + 1) / backend.target.weight_bp
        )

    def _unavailable(self, model: str, entry: Entry | None) -> ApiError:
        targets = entry.routes.targets if entry is not None else ()
        if all(target.state == "starting" for target in targets):
            return model_starting(model)
        return model_unavailable(model)

    # --- what there is

    def models(self) -> Iterator[tuple[str, str]]:
        """(name, model) of every name that a request may use, models before their aliases."""
        known = dict(self._configured)
        for model, entry in self.table.entries.items():
            known[model] = tuple(dict.fromkeys((*known.get(model, ()), *entry.routes.aliases)))
        for model, aliases in known.items():
            yield model, model
            for alias in aliases:
                yield alias, model

    def not_ready(self) -> list[str]:
        """Models without a ready target."""
        entries = self.table.entries
        known = dict.fromkeys((*self._configured, *entries))
        return [model for model in known if model not in entries or not entries[model].live]


def sticky(live: tuple[Backend, ...], salt: str, model: str, user: str) -> Backend:
    """The split of a rollout: hash(salt, model, user) mod 10000 falls into one target's share.

    A pure function, so all gateways agree. Shares are laid out from the document's last target on: the
    standby comes last in it and owns [0, weight), so raising its weight only moves users forward. Shares of
    targets that can't take the request are filled by the others in proportion.
    """
    digest = hashlib.blake2b(
        f"{salt}|{model}|{user}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    bucket = int.from_bytes(digest) % FULL_WEIGHT
    total = sum(backend.target.weight_bp for backend in live)
    edge = 0
    for backend in reversed(live):
        edge += backend.target.weight_bp
        if bucket * total < edge * FULL_WEIGHT:
            return backend
    return live[0]
