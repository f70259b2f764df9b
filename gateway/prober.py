"""Asks every ready target who it is, whether it gets on, and how much it can take.

Each gateway asks for itself: what matters is whether *it* reaches the worker. A worker says itself whether
its engine makes progress, so one that is merely busy stays up: only a late answer, several times over, a
refused connection or its own word makes it down.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from gateway.connection import Connection, UpstreamError
from gateway.health import HealthSettings
from gateway.targets import NO_LIMIT, Backend
from gateway.upstream import Upstream

LATE_IN_A_ROW = 3  # answers that didn't come in time
MAX_ANSWER = 64 * 1024
_ASK = b"GET %b HTTP/1.1\r\nhost: worker\r\n\r\n"

log = logging.getLogger(__name__)


class _Identity(msgspec.Struct, frozen=True):
    slot: str
    generation: int


class _Report(msgspec.Struct, frozen=True):
    """Of a worker's /health: requests inside it, from everywhere, and how many it computes at a time."""

    inflight: int = 0
    max_num_seqs: int | None = None


@dataclass(frozen=True)
class _Timeouts:
    connect: float
    first_byte: float
    idle: float
    total: float


class _Bad(Exception):
    """The answer shows that the target can't be used. `identified`: it is the right process, though."""

    def __init__(self, why: str, *, identified: bool) -> None:
        super().__init__(why)
        self.identified = identified


class Prober:
    """One task per target. `gateways`: processes like this one that share the workers."""

    def __init__(self, upstream: Upstream, settings: HealthSettings, gateways: int = 1) -> None:
        self._upstream = upstream
        self._settings = settings
        self._gateways = gateways
        within = settings.probe_timeout
        self._timeouts = _Timeouts(within, within, within, within)
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    def watch(self, targets: Iterable[Backend]) -> None:
        """From now on these and no others; needs a running event loop."""
        wanted = set(targets)
        for backend in self._tasks.keys() - wanted:
            self._tasks.pop(backend).cancel()
        for backend in wanted - self._tasks.keys():
            name = f"probe {backend.target.id}"
            self._tasks[backend] = asyncio.get_running_loop().create_task(self._watch(backend), name=name)

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, backend: Backend) -> None:
        within = self._settings.probe_timeout
        late = 0
        while True:
            began = time.monotonic()
            try:
                backend.limit = self._limit(await self._ask(backend), backend)
                late = 0
                backend.health.probed(identified=True, up=True)
            except _Bad as error:
                late = 0
                backend.health.probed(identified=error.identified, up=False, why=str(error))
            except UpstreamError as error:
                if error.kind == "exhausted":  # which says nothing of the target
                    await asyncio.sleep(self._settings.probe_interval)
                    continue
                late = late + 1 if time.monotonic() - began >= within else LATE_IN_A_ROW
                if late >= LATE_IN_A_ROW:
                    slow = f"it did not answer {late} times within {within:g} s each"
                    why = slow if error.kind == "timeout" else str(error)
                    backend.health.probed(identified=backend.health.identified, up=False, why=why)
            backend.queue.place()
            await asyncio.sleep(self._settings.probe_interval * random.uniform(0.9, 1.1))

    async def _ask(self, backend: Backend) -> _Report:
        """What the target says about itself. _Bad or UpstreamError otherwise."""
        connection = await self._upstream.connect(backend.target.address, self._settings.probe_timeout)
        try:
            status, body = await self._get(connection, b"/internal/whoami")
            self._check_identity(backend, status, body)
            if not connection.finish():
                connection.close()
                connection = await self._upstream.connect(
                    backend.target.address, self._settings.probe_timeout
                )
            status, body = await self._get(connection, b"/health")
        finally:
            connection.close()
        if status != 200:
            raise _Bad(f"it says that it makes no progress (/health: {status})", identified=True)
        try:
            return msgspec.json.decode(body, type=_Report)
        except msgspec.MsgspecError:
            return _Report()

    def _check_identity(self, backend: Backend, status: int, body: bytes) -> None:
        target = backend.target
        try:
            found = msgspec.json.decode(body, type=_Identity) if status == 200 else None
        except msgspec.MsgspecError:
            found = None
        if found is None:
            raise _Bad("what answers at its address is no worker of a fleet", identified=False)
        if (found.slot, found.generation) != (target.slot, target.generation):
            who = f"{found.slot[:100]}.{found.generation}"
            raise _Bad(f"{who} answers at its address", identified=False)

    async def _get(self, connection: Connection, path: bytes) -> tuple[int, bytes]:
        within = self._settings.probe_timeout
        ends_at = asyncio.get_running_loop().time() + within
        connection.start(_ASK % path, b"", self._timeouts, within, ends_at)
        await connection.head()
        body = bytearray()
        while piece := await connection.read():
            body += piece
            if len(body) > MAX_ANSWER:
                raise _Bad("its answer is longer than any worker's", identified=False)
        return connection.status, bytes(body)

    def _limit(self, report: _Report, backend: Backend) -> int:
        """Requests of this gateway on the target: what the worker computes at a time, and some that are ready
        when one ends. With others beside it, its share, or what they leave."""
        if report.max_num_seqs is None:
            return NO_LIMIT
        most = max(1, report.max_num_seqs)
        capacity = most + max(1, most // 8)
        if self._gateways == 1:
            return capacity
        others = max(0, report.inflight - backend.inflight)
        return max(-(-capacity // self._gateways), capacity - others)
