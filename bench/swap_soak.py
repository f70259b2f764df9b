"""Swaps under load while gateways are paused and killed and the supervisor is killed: nothing else is lost.

    python -m bench.swap_soak --swaps 200 --out bench/results/swap_soak.json

Under a real systemd, where gateways and workers outlive the supervisor: three gateway processes, workers
without a model, 200 users with 50 numbered requests in flight (short, long, streamed). Swaps go through the
supervisor, by shares of the users, with a hold (`recreate`), and with an abort in the middle, after random
pauses. Each request must end once and whole, and one worker must have worked on it. Excepted, and counted,
are those on connections that a gateway held when it was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.soak_fleet import SoakFleet, soak_fleet
from bench.soak_load import Account, Kill, account, ask, loaded
from gateway.cli.swap_client import SwapRefused
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.rollout import Options
from tests.gateway.numbered_load import USERS, Load
from tests.gateway.user_manager import user_manager

GATEWAYS = 3
AT_A_TIME = 50
MODEL = "m"
KINDS = ("canary", "recreate", "abort")
STEPS = ((5.0, 25.0, 100.0), (50.0, 100.0), (100.0,))
PAUSES = (0.1, 0.3, 3.5)  # seconds; the last is longer than anybody waits for a gateway's sign of life


@dataclass
class Soak:
    """What happened. `disturb`: seconds between one disturbance and the next, on average; 0: none."""

    fleet: SoakFleet
    rng: random.Random
    disturb: float
    kills: list[Kill] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    async def swap(self, number: int) -> None:
        """One to its end, whoever dies meanwhile."""
        rng = self.rng
        # Each once at first, so that also a short run has seen them all.
        kind = KINDS[number - 1] if number <= len(KINDS) else rng.choices(KINDS, (8, 1, 1))[0]
        options = Options(
            strategy="recreate" if kind == "recreate" else "canary",
            steps=rng.choice(STEPS),
            hold=rng.random() * (3.0 if kind == "abort" else 0.5),
        )
        request = StartRequest(source=f"fake/version{number}", options=options)
        began = time.monotonic()
        await self.fleet.begin_swap(MODEL, request)
        if kind == "abort":
            await asyncio.sleep(rng.random() * 3)
            with contextlib.suppress(SwapRefused):  # too late for it, or nobody is there to ask
                await asyncio.to_thread(self.fleet.swaps.command, MODEL, "abort")
        rollout = await self.fleet.swap_ended(MODEL)
        self.seconds.append(time.monotonic() - began)
        self.outcomes[rollout.outcome or "none"] += 1
        if rollout.outcome not in ("completed", "aborted"):
            self.reasons.append(f"{number}, {rollout.outcome}: {rollout.reason}")
        self.kinds[kind] += 1

    async def disturbances(self) -> None:
        """For ever: each kind once, then mostly pauses of a gateway, at times the end of a supervisor or
        gateway."""
        ways: tuple[Callable[[], Awaitable[None]], ...] = (
            self._pause,
            self._kill_supervisor,
            self._kill_gateway,
        )
        turn = 0
        while True:
            await asyncio.sleep(self.rng.random() * 2 * self.disturb)
            await (ways[turn] if turn < len(ways) else self.rng.choices(ways, (6, 2, 1))[0])()
            turn += 1

    async def _pause(self) -> None:
        async with self.fleet.paused(self.rng.choice(self.fleet.slots)) as was_there:
            self.counts["gateways paused"] += was_there
            await asyncio.sleep(self.rng.choice(PAUSES))

    async def _kill_supervisor(self) -> None:
        before = await self.fleet.status()
        if before is not None:
            await self.fleet.kill_supervisor()
            self.counts["supervisors killed"] += 1

    async def _kill_gateway(self) -> None:
        kill = await self.fleet.kill_gateway(self.rng.choice(self.fleet.slots))
        if kill is not None:
            self.kills.append(kill)
            self.counts["gateways killed"] += 1


async def swaps(
    fleet: SoakFleet, load: Load, count: int, disturb: float, seed: int, say: Callable[[str], None] = print
) -> Soak:
    """So many, one after another, under a load that is running."""
    run = Soak(fleet, random.Random(seed), disturb)
    disturbing = asyncio.create_task(run.disturbances()) if disturb else None
    try:
        for number in range(1, count + 1):
            await asyncio.sleep(run.rng.random() * 0.5)
            try:
                await run.swap(number)
            except TimeoutError as error:  # no other can begin
                run.reasons.append(f"{number}: {error}")
                break
            failed = len(load.lost) + len(load.wrong)
            say(f"swap {number}: {run.seconds[-1]:.1f} s, {len(load.whole)} whole, {failed} not")
    finally:
        if disturbing is not None:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
    return run


async def soak(count: int, disturb: float, seed: int, at_a_time: int) -> dict[str, Any]:
    """The whole of it, as it is shown."""
    with user_manager() as manager:
        async with soak_fleet(manager, GATEWAYS, {MODEL: 1}) as fleet:
            load = Load(fleet.connect, ask, at_a_time=at_a_time, seed=seed)
            began = time.monotonic()
            async with loaded(load):
                run = await swaps(fleet, load, count, disturb, seed)
            seconds = time.monotonic() - began
            return shown(run, account(load, run.kills, fleet.worked), await fleet.strangers(), seconds)


def shown(run: Soak, found: Account, strangers: list[str], seconds: float) -> dict[str, Any]:
    ordered = sorted(run.seconds) or [0.0]
    return {
        "seconds": round(seconds, 1),
        "swaps": len(run.seconds),
        "of_which": dict(run.kinds),
        "outcomes": dict(run.outcomes),
        "neither_completed_nor_aborted": run.reasons,
        "seconds_per_swap": {
            "median": round(statistics.median(ordered), 2),
            "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 2),
            "longest": round(ordered[-1], 2),
        },
        "disturbances": dict(run.counts),
        **found.shown(),
        "processes_left_over": strangers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument(
        "--disturb", type=float, default=3.0, help="Mean seconds between disturbances; 0: none."
    )
    parser.add_argument("--in-flight", type=int, default=AT_A_TIME)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    host = machine.host()
    found = asyncio.run(soak(arguments.swaps, arguments.disturb, arguments.seed, arguments.in_flight))
    result = {
        "machine": host,
        "gateways": GATEWAYS,
        "users": USERS,
        "in_flight": arguments.in_flight,
        **found,
    }
    machine.publish(result, arguments.out)


if __name__ == "__main__":
    main()
