"""Swaps under load while gateways are paused and killed: what nobody killed is never lost.

The swaps here are the protocol alone (weights, barrier, fence, end), by what gateways show on their boards;
the supervisor's own are in other tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from pathlib import Path

import psutil
import pytest

from gateway.fleet.observer import Observer
from gateway.fleet.state import Target
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.gateway_processes import Gateways, gateways
from tests.gateway.numbered_load import Load
from tests.gateway.rig import Rig, target, until


class Swaps:
    """Replaces the model's worker again and again."""

    def __init__(self, running: Gateways, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.observer = Observer({slot: running.state.board(slot) for slot in running.slots})
        self.generation = 1

    async def swap(self) -> None:
        """By shares of the users; now and then with a hold, the old one's end before the new one's start."""
        rig, old, generation = self.rig, self.rig.workers[-1], self.generation
        if self.rng.random() < 0.3:
            rig.route(self._target(old, generation, 0), hold=True)
            await self._end(old)
            new = await rig.worker(f"w{generation + 1}")
        else:
            new = await rig.worker(f"w{generation + 1}")
            for share in (0, 500, 10_000):
                rig.route(
                    self._target(old, generation, 10_000 - share),
                    self._target(new, generation + 1, share),
                    salt=f"r{generation}",
                )
                await asyncio.sleep(self.rng.random() * 0.3)
            await self._end(old)
        self.generation += 1
        rig.route(self._target(new, generation + 1, 10_000))

    async def _end(self, worker: FakeWorker) -> None:
        ids = [f"v{self.generation}.{self.generation}"]
        epoch = self.rig.epoch
        await until(lambda: self.observer.applied(epoch) and not self.observer.inflight("m", ids))
        worker.draining = True
        await until(lambda: worker.busy == worker.unsent == 0)
        await worker.stop()

    def _target(self, worker: FakeWorker, generation: int, weight: int) -> Target:
        return target(
            worker, slot=f"v{generation}", generation=generation, weight_bp=weight, variant=str(generation)
        )


async def disturb(running: Gateways, rng: random.Random, cut: list[int]) -> None:
    """Pauses one gateway after the other, at times longer than anybody waits for it, and kills one; `cut`
    gets the clients' ports that it was connected to."""
    try:
        for round_ in range(1000):
            await asyncio.sleep(rng.random() * 0.5)
            slot = rng.choice(running.slots)
            if round_ % 4 == 1:
                cut += await held(running.children[slot].pid)
                running.kill(slot)
                await running.start(slot)
                continue
            running.children[slot].send_signal(signal.SIGSTOP)
            await asyncio.sleep(rng.choice((0.1, 0.3, 3.5)))
            running.children[slot].send_signal(signal.SIGCONT)
    finally:
        for child in running.children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)


async def held(pid: int) -> list[int]:
    """The clients' ports of a process that is stopped for good, so that it takes no other."""
    process = psutil.Process(pid)
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    return [one.raddr.port for one in process.net_connections("tcp") if one.raddr]


@pytest.mark.parametrize(("disturbed", "count"), [(False, 2), (True, 5)], ids=["calm", "disturbed"])
async def test_swaps_lose_nothing(tmp_path: Path, disturbed: bool, count: int) -> None:
    rng = random.Random(7)
    cut: list[int] = []
    async with gateways(tmp_path) as (running, rig):
        swaps = Swaps(running, rig, rng)
        rig.route(swaps._target(rig.workers[0], 1, 10_000))
        await until(lambda: swaps.observer.applied(rig.epoch))
        load = Load(running.connect, at_a_time=30, pause=0.05)
        loading = asyncio.create_task(load.run())
        disturbing = asyncio.create_task(disturb(running, rng, cut)) if disturbed else None
        while swaps.generation <= count or (disturbed and not cut):
            await swaps.swap()
        if disturbing is not None:
            disturbing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await disturbing
        load.stop()
        await loading
        load.check(cut)
        load.check_once(rig.workers)
        assert len(load.whole) > 100
        if not disturbed:
            ids = [f"v{number}.{number}" for number in range(1, swaps.generation + 1)]
            total = len(load.whole)
            await until(lambda: swaps.observer.window("m", ids).requests == total)
            assert swaps.observer.window("m", ids).errors == 0
