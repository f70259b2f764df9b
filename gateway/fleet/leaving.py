"""Takes workers away without losing a request: no weight, then no gateway has one there, then they have none.

The same order as at the end of a rollout. What outlasts the limit is ended with an error event, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from gateway.fleet.commands import Slot
from gateway.fleet.driver.memory import until_free
from gateway.fleet.driver.peer import Lost, Peer, Refused, peers
from gateway.fleet.observer import Observer
from gateway.fleet.unit import Timing, UnitStatus
from gateway.fleet.workers import Workers, gpus_of

LIMIT = 900.0  # seconds that requests in flight may take to end
POLL = 0.1
_QUIET = 0.6  # seconds without a request, over which a gateway shows its numbers three times
_ABSENT = ("waiting", "backoff", "failed", "stopped")

Say = Callable[[str], None]


class Leaving:
    """`limit`: seconds that requests in flight may take to end."""

    def __init__(self, workers: Workers, observer: Observer, timing: Timing, limit: float = LIMIT) -> None:
        self._workers = workers
        self._observer = observer
        self._patience = timing.drain + timing.stop_margin
        self._limit = limit

    async def model(self, name: str, say: Say) -> int:
        """All of a model's workers, and the model from the routes. Returns how many requests were cut.

        First nobody finds it any more; who already waits for one of its workers is served.
        """
        publisher = self._workers.publisher
        epoch = publisher.retire(name)
        deadline = self._deadline()
        async with _until(deadline):
            await self._applied(epoch, say)
            await self._quiet(name, say)
        cut = await self._empty(name, self._workers.slots(name), deadline, say)
        publisher.forget(name)
        return cut

    async def slots(self, name: str, slots: Sequence[Slot], say: Say) -> int:
        """Some of a model's workers. Returns how many requests were cut."""
        return await self._empty(name, slots, self._deadline(), say)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._limit

    async def _quiet(self, name: str, say: Say) -> None:
        """Until gateways have had no request of the model for a while, on a worker or waiting for one."""
        quiet = 0.0
        while quiet < _QUIET:
            targets = [target.id for target in self._workers.publisher.routes(name).targets]
            waiting, busy = self._observer.waiting(name), self._observer.inflight(name, targets)
            say(f"{busy} in flight, {waiting} waiting")
            quiet = 0.0 if waiting or busy else quiet + POLL
            await asyncio.sleep(POLL)

    async def _empty(self, name: str, slots: Sequence[Slot], deadline: float, say: Say) -> int:
        epoch = self._workers.publisher.withhold([slot.name for slot in slots])
        async with peers(self._peers(name, slots)) as leaving:
            async with _until(deadline):
                await self._applied(epoch, say)
                while busy := self._observer.inflight(name, [peer.target for peer in leaving]):
                    say(f"{busy} in flight")
                    await asyncio.sleep(POLL)
                await asyncio.gather(*(self._emptied(peer, say) for peer in leaving))
            cut = sum(await asyncio.gather(*map(_cut, leaving)))
        say("stopping")
        await asyncio.gather(*(self._workers.remove(slot.name, self._patience) for slot in slots))
        await until_free({gpu for slot in slots for gpu in gpus_of(slot.entry.worker)})
        return cut

    async def _applied(self, epoch: int, say: Say) -> None:
        """Until all gateways that live route so; one that doesn't reads the routes before it claims."""
        while self._observer.living() and not self._observer.applied(epoch):
            say("gateways take the routes")
            await asyncio.sleep(POLL)

    async def _emptied(self, peer: Peer, say: Say) -> None:
        """Until the worker, which is told to take no more, says that it has nothing, or is gone."""
        while True:
            status = self._status(peer.slot)
            if status is None or status.state in _ABSENT or status.generation != peer.generation:
                return
            try:
                left = (await peer.post("/admin/drain")).get("inflight")
                if not left:
                    return
                say(f"{peer.slot} has {left} in flight")
            except Refused:  # it can't be told; SIGTERM will
                return
            except Lost:
                pass
            await asyncio.sleep(POLL)

    def _status(self, slot: str) -> UnitStatus | None:
        unit = self._workers.unit(slot)
        return unit.status if unit is not None else None

    def _peers(self, name: str, slots: Sequence[Slot]) -> list[Peer]:
        """Those that have a process."""
        found = [status for slot in slots if (status := self._status(slot.name)) is not None]
        return [
            Peer(self._workers.uds(one.slot, one.generation), one.slot, one.generation, name)
            for one in found
            if one.state not in _ABSENT and one.pid is not None
        ]


async def _cut(peer: Peer) -> int:
    """Ends what is still there; usually nothing is."""
    try:
        return int((await peer.post("/admin/abort")).get("aborted", 0))
    except (Lost, Refused):
        return 0


@contextlib.asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """What isn't over by then (the loop's time) is left; that is no error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            yield
