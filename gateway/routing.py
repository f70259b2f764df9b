"""Model name → worker. The table comes from the routes file and is replaced as a whole; a claim never awaits.

The file is polled off the hot path. A table that wasn't looked at for `STALE_AFTER` seconds (the process
was paused) is read again before a claim, so an old route can't be used after the supervisor has stopped
waiting for this process.

Between versions of a model (a rollout) users are split by hash and weight; of replicas the least busy one is
taken, or the one that has the conversation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from contracts.errors import ApiError, model_not_found
from gateway import affinity
from gateway.errors import model_starting, model_unavailable
from gateway.fleet.state import RoutesFile, Target
from gateway.health import Health
from gateway.queue import LEVELS, Priority, Queue, Refusal
from gateway.targets import Backend, Entry, Table, shares_of, sticky

POLL_EVERY = 0.2
STALE_AFTER = 2.0
BALANCE = 1.25  # times the mean load that a replica may have and still keep its conversations

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterSettings:
    """`fail_timeout` in seconds; `queue_size`: requests that may wait per model; `probed`: a target is given
    nothing before somebody has reported on its health."""

    max_fails: int = 3
    fail_timeout: float = 10.0
    queue_size: int = 1024
    probed: bool = False


class Router:
    """Routes of the file `path`. `configured`: model name → aliases, known before they have a route."""

    def __init__(
        self,
        path: Path,
        configured: Mapping[str, Iterable[str]],
        on_change: Callable[[Table], None] = lambda table: None,
        settings: RouterSettings = RouterSettings(),
    ) -> None:
        self._path = path
        self.configure(configured)
        self._on_change = on_change
        self._settings = settings
        self._signature: tuple[int, int, int] | None = None
        self._turn = 0
        self._checked_at = 0.0
        self.queues: dict[str, Queue[Backend]] = {}
        self.on_waited: Callable[[str, float], None] = lambda model, seconds: None
        self.on_refused: Callable[[str, Refusal], None] = lambda model, reason: None
        self.table = Table(RoutesFile(), {}, self._backend)
        self.refresh()

    # --- the table

    def configure(self, configured: Mapping[str, Iterable[str]]) -> None:
        """From now on these are the models that are known without a route."""
        self._configured = {name: tuple(aliases) for name, aliases in configured.items()}
        self._names = {alias: name for name, aliases in self._configured.items() for alias in aliases}
        self._names.update((name, name) for name in self._configured)

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
            file = msgspec.json.decode(self._path.read_bytes(), type=RoutesFile)
            table = Table(file, self.table.backends, self._backend)
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            self._complain(signature, f"can't be used ({error})")
            return
        self._signature = signature
        self.table = table
        log.info("routes: epoch %d, models %s", table.epoch, ", ".join(table.entries) or "none")
        for model, queue in self.queues.items():
            queue.hold(self._held(model))
        self._on_change(table)
        for queue in self.queues.values():
            queue.place()

    def _complain(self, signature: tuple[int, int, int], what: str) -> None:
        if signature != self._signature:
            self._signature = signature
            log.warning("routes file %s %s; keeping epoch %d", self._path, what, self.table.epoch)

    def _backend(self, model: str, target: Target) -> Backend:
        health = Health(f"{target.id} of {model}", self._settings, probed=self._settings.probed)
        return Backend(model, target, health, self.queue(model))

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

    def claim(
        self,
        model: str,
        user: str,
        tried: Collection[str] = (),
        body: bytes = b"",
        priority: Priority = "normal",
        weight: int = 1,
    ) -> Backend | None:
        """Picks a worker of a resolved model and counts the request on it in one step; `release` uncounts it.

        None when those that could take it are full, or have not said yet who they are, or when the model is
        held: `wait` then. Nobody who waits could have taken the place of one who needn't. ApiError 503 when
        there is no worker.

        `tried`: ids of targets that already refused this request. `body`: its body, which tells the
        conversation that it belongs to. `weight`: as so many requests it counts.
        """
        if time.monotonic() - self._checked_at > STALE_AFTER:
            self.refresh()
        entry, level = self.table.entries.get(model), LEVELS[priority]
        live = entry.live if entry is not None else ()
        if len(live) == 1 and not tried and live[0].health.clear:
            backend = live[0] if live[0].has_room(level) else None
        else:
            backend = self._search(model, user, tried, body, level)
        if backend is not None:
            backend.claim(level, weight)
        return backend

    async def wait(
        self,
        model: str,
        user: str,
        priority: Priority,
        within: float,
        tried: Collection[str],
        body: bytes,
        weight: int = 1,
    ) -> Backend:
        """A claim that was None, for at most `within` seconds; ApiError 503 when the model is overloaded."""
        return await self.queue(model).wait(
            partial(self.claim, model, user, tried, body, priority, weight), user, priority, within, weight
        )

    def queue(self, model: str) -> Queue[Backend]:
        queue = self.queues.get(model)
        if queue is None:
            worth = partial(self._worth_placing, model)
            queue = self.queues[model] = Queue(
                model,
                self._settings.queue_size,
                worth,
                partial(self._inflight, model),
                lambda seconds: self.on_waited(model, seconds),
                lambda reason: self.on_refused(model, reason),
            )
            queue.hold(self._held(model))
        return queue

    def _held(self, model: str) -> bool:
        entry = self.table.entries.get(model)
        return entry is not None and entry.held

    def _inflight(self, model: str) -> int:
        entry = self.table.entries.get(model)
        return sum(backend.inflight for backend in entry.live) if entry is not None else 0

    def _worth_placing(self, model: str, level: int) -> bool:
        """Whether anything but None can come of a claim of that class."""
        entry = self.table.entries.get(model)
        if entry is None or not entry.live:
            return entry is None or not entry.held
        return any(backend.has_room(level) for backend in entry.live)

    def _search(
        self, model: str, user: str, tried: Collection[str], body: bytes, level: int
    ) -> Backend | None:
        """`_pick`, once more when there is no worker but there are newer routes: another process may know
        already who has come in its place."""
        table = self.table
        try:
            return self._pick(model, user, tried, body, level)
        except ApiError:
            self.refresh()
            if self.table is table:
                raise
            return self._pick(model, user, tried, body, level)

    def _pick(self, model: str, user: str, tried: Collection[str], body: bytes, level: int) -> Backend | None:
        entry = self.table.entries.get(model)
        if entry is None or not (entry.live or entry.held):
            raise self._unavailable(model, entry)
        if entry.held:
            return None
        usable: Sequence[Backend] = entry.live
        shares = entry.shares
        if tried or not _all_clear(usable):
            usable = self._usable(entry, tried)
            if not usable:
                return None
            shares = shares_of(usable) if shares else ()
        if shares:
            usable = sticky(shares, entry.routes.salt, entry.routes.model, user)
        backend = self._replica(usable, body, level)
        if backend is not None and not backend.health.clear:
            backend.health.taken(time.monotonic())
        return backend

    def _usable(self, entry: Entry, tried: Collection[str]) -> list[Backend]:
        """Those that may get this request. Empty while that is not known yet of any; ApiError 503 when there
        are none."""
        now = time.monotonic()
        known = [backend for backend in entry.live if backend.target.id not in tried]
        usable = [backend for backend in known if backend.health.clear or backend.health.admits(now)]
        if not usable:  # the last ones are never ejected, except those that aren't who they should be
            usable = [backend for backend in known if backend.health.identified]
        if not usable and all(backend.health.asked for backend in known):
            raise self._unavailable(entry.routes.model, entry)
        return usable

    def _replica(self, usable: Sequence[Backend], body: bytes, level: int) -> Backend | None:
        """The one that has the conversation, if it isn't overloaded: consistent hashing with bounded loads
        (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350). Else the least busy. None when all are full."""
        if len(usable) == 1:
            return usable[0] if usable[0].has_room(level) else None
        key = affinity.conversation_key(body) if body else None
        if key is not None:
            load, weight, best, home = 1, 0, -1.0, usable[0]
            for backend in usable:
                load += backend.load
                weight += backend.target.weight_bp
                score = affinity.score(key, backend.seed, backend.target.weight_bp)
                if score > best:
                    best, home = score, backend
            fair = BALANCE * load * home.target.weight_bp / weight
            if home.load < fair and home.has_room(level):
                return home
        free = [backend for backend in usable if backend.has_room(level)]
        if not free:
            return None
        self._turn += 1
        start = self._turn % len(free)  # else the first of equals would get every request of a quiet model
        return min(free[start:] + free[:start], key=lambda one: (one.load + 1) / one.target.weight_bp)

    def _unavailable(self, model: str, entry: Entry | None) -> ApiError:
        targets = entry.routes.targets if entry is not None else ()
        if all(target.state == "starting" for target in targets):
            return model_starting(model)
        return model_unavailable(model)

    # --- what there is

    def models(self) -> Iterator[tuple[str, str]]:
        """(name, model) of every name that a request may use, models before their aliases."""
        known = dict(self._configured)
        for model, entry in self.table.found():
            known[model] = tuple(dict.fromkeys((*known.get(model, ()), *entry.routes.aliases)))
        for model, aliases in known.items():
            yield model, model
            for alias in aliases:
                yield alias, model

    def not_ready(self) -> list[str]:
        """Models without a ready target that is who it should be."""
        entries = self.table.entries
        known = dict.fromkeys((*self._configured, *(model for model, _ in self.table.found())))
        return [model for model in known if model not in entries or not _any_good(entries[model].live)]


def _any_good(live: tuple[Backend, ...]) -> bool:
    return any(backend.health.identified or not backend.health.asked for backend in live)


def _all_clear(live: Sequence[Backend]) -> bool:
    for backend in live:  # noqa: SIM110 (a generator takes three times as long)
        if not backend.health.clear:
            return False
    return True
