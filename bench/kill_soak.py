"""kill -9 of supervisor, gateways and workers at random, under load: who loses, and what comes back.

    python -m bench.kill_soak --minutes 10 --out bench/results/kill_soak.json

Under a real systemd, where gateways and workers outlive the supervisor: three gateway processes, three
workers without a model, 200 users with 50 numbered requests in flight (short, long, streamed). Only requests
that the killed process held may fail, those of a worker with an error that says so; after the last kill every
process is back, and there is none that nobody supervises. A worker is spared while no other serves.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.soak_fleet import SoakFleet, soak_fleet
from bench.soak_load import Account, Kill, account, ask, loaded
from tests.gateway.numbered_load import USERS, Load
from tests.gateway.user_manager import user_manager

GATEWAYS, WORKERS = 3, 3
AT_A_TIME = 50
MODEL = "m"
ROLES = ("supervisor", "gateway", "worker")


@dataclass
class Soak:
    """What happened. `back`: seconds after each role's kills until everything was ready again; `not_back`:
    what never was."""

    fleet: SoakFleet
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    back: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    not_back: str = ""

    async def kill(self, role: str) -> bool:
        """Whether there was one to kill."""
        if role == "supervisor":
            if await self.fleet.status() is None:
                return False
            await self.fleet.kill_supervisor()
        else:
            slot = self.rng.choice(self.fleet.slots)
            kill = await (self.fleet.kill_gateway(slot) if role == "gateway" else self.fleet.kill_worker())
            if kill is None:
                return False
            self.kills.append(kill)
        self.counts[role] += 1
        return True

    async def until_back(self) -> None:
        await self.fleet.until_ready(gone=[kill.target for kill in self.kills])

    async def run(self, seconds: float, pause: float) -> None:
        """Half of the kills come while the last one's victim isn't back yet. Each role is killed once at
        first, so that also a short run has seen them all."""
        end = time.monotonic() + seconds
        turn = 0
        while time.monotonic() < end or turn < len(ROLES):
            await asyncio.sleep(self.rng.random() * 2 * pause)
            role = ROLES[turn] if turn < len(ROLES) else self.rng.choice(ROLES)
            at = time.monotonic()
            if not await self.kill(role):
                continue
            turn += 1
            if self.rng.random() < 0.5:
                await self.until_back()
                self.back[role].append(time.monotonic() - at)


async def kills(
    fleet: SoakFleet, load: Load, seconds: float, pause: float, seed: int, say: Callable[[str], None] = print
) -> Soak:
    """For so many seconds, one every `pause` on average, under a load that is running. At the end all are
    back."""
    run = Soak(fleet, random.Random(seed))
    telling = asyncio.create_task(_tell(run, load, say))
    try:
        await run.run(seconds, pause)
        await run.until_back()
    except TimeoutError as error:
        run.not_back = str(error)
    finally:
        telling.cancel()
    return run


async def soak(seconds: float, pause: float, seed: int, at_a_time: int) -> dict[str, Any]:
    """The whole of it, as it is shown."""
    with user_manager() as manager:
        async with soak_fleet(manager, GATEWAYS, {MODEL: WORKERS}) as fleet:
            load = Load(fleet.connect, ask, at_a_time=at_a_time, seed=seed)
            began = time.monotonic()
            async with loaded(load):
                run = await kills(fleet, load, seconds, pause, seed)
            seconds = time.monotonic() - began
            return shown(run, account(load, run.kills, fleet.worked), await fleet.strangers(), seconds)


async def _tell(run: Soak, load: Load, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(10)
        say(f"{dict(run.counts)} killed, {len(load.whole)} whole, {len(load.lost) + len(load.wrong)} not")


def shown(run: Soak, found: Account, strangers: list[str], seconds: float) -> dict[str, Any]:
    longest = {role: round(max(times, default=0.0), 2) for role, times in run.back.items()}
    return {
        "seconds": round(seconds, 1),
        "killed": dict(run.counts),
        "longest_until_all_ready_s": longest,
        "not_back": run.not_back,
        **found.shown(),
        "processes_left_over": strangers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--pause", type=float, default=2.0, help="Mean seconds before each kill.")
    parser.add_argument("--in-flight", type=int, default=AT_A_TIME)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    host = machine.host()
    found = asyncio.run(soak(60 * arguments.minutes, arguments.pause, arguments.seed, arguments.in_flight))
    result = {
        "machine": host,
        "gateways": GATEWAYS,
        "workers": WORKERS,
        "users": USERS,
        "in_flight": arguments.in_flight,
        **found,
    }
    machine.publish(result, arguments.out)


if __name__ == "__main__":
    main()
