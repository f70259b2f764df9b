"""First-token times of users while a model is swapped, beside those of the moments before.

    python -m bench.swap_latency --out bench/results/swap_latency.json

Two gateway processes and two models under a real systemd, on workers without a model, so that loading one
doesn't compete for the cores. 200 users stream from each model at a steady pace. A round is as long a time
without a swap as the last swap took, and then a swap of one of the models; times of all rounds are compared,
for the users of the model that is swapped and for those of the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from bench.soak_fleet import SoakFleet, soak_fleet
from bench.soak_load import loaded, stream
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.rollout import Options
from tests.gateway.numbered_load import USERS, Asked, Load
from tests.gateway.user_manager import user_manager

GATEWAYS = 2
CLIENTS = 100  # connections for each model
SWAPPED, OTHER = "m", "other"
STEPS, HOLD = (5.0, 25.0, 100.0), 1.0
EVENTS, PER_EVENT = 8, 0.01
AIM = 1.2

Span = tuple[float, float]  # time.monotonic's


def ask(first: float, model: str, number: int, user: str, _: random.Random) -> Asked:
    body = {"model": model, "user": user, "number": number, "stream": True}
    return stream({**body, "first": first, "events": EVENTS, "pause": PER_EVENT})


async def measure(rounds: int, rate: float, first: float) -> tuple[dict[str, Load], list[Span], list[Span]]:
    """The loads with all their times, the spans without a swap, and those with one. `rate`: requests a second
    for each model."""
    pause = CLIENTS / rate - first - EVENTS * PER_EVENT
    with user_manager() as manager:
        async with soak_fleet(manager, GATEWAYS, {SWAPPED: 1, OTHER: 1}) as fleet:
            loads = {
                model: Load(fleet.connect, partial(ask, first, model), at_a_time=CLIENTS, pause=pause)
                for model in (SWAPPED, OTHER)
            }
            async with loaded(loads[SWAPPED]), loaded(loads[OTHER]):
                quiet, during = await _alternate(fleet, rounds)
    for load in loads.values():
        load.check()
    return loads, quiet, during


async def _alternate(fleet: SoakFleet, rounds: int) -> tuple[list[Span], list[Span]]:
    quiet, during = [], []
    last = await _swap(fleet, 0)  # the first one is for warming up
    for number in range(1, rounds + 1):
        began = time.monotonic()
        await asyncio.sleep(last[1] - last[0])
        quiet.append((began, time.monotonic()))
        last = await _swap(fleet, number)
        during.append(last)
        print(f"round {number}: the swap took {last[1] - last[0]:.1f} s", flush=True)
    return quiet, during


async def _swap(fleet: SoakFleet, number: int) -> Span:
    began = time.monotonic()
    options = Options(steps=STEPS, hold=HOLD)
    await fleet.begin_swap(SWAPPED, StartRequest(source=f"fake/version{number}", options=options))
    rollout = await fleet.swap_ended(SWAPPED)
    if rollout.outcome != "completed":
        raise RuntimeError(f"swap {number} {rollout.outcome}: {rollout.reason}")
    return began, time.monotonic()


def compared(load: Load, quiet: Sequence[Span], during: Sequence[Span]) -> dict[str, Any]:
    """First-token times in ms, and the ratios; one of rounds is the median over single rounds."""
    times = sorted((one.began, one.first - one.began) for one in load.whole.values() if one.first is not None)

    def within(spans: Sequence[Span]) -> list[float]:
        return sorted(taken for began, taken in times if any(start <= began < end for start, end in spans))

    def p99(taken: Sequence[float]) -> float:
        return taken[int(0.99 * (len(taken) - 1))]

    before, swapping = within(quiet), within(during)
    by_round = [p99(within([b])) / p99(within([a])) for a, b in zip(quiet, during, strict=True)]
    ratio = p99(swapping) / p99(before)
    return {
        "requests_before": len(before),
        "requests_during": len(swapping),
        "p50_before_ms": round(1000 * statistics.median(before), 2),
        "p50_during_ms": round(1000 * statistics.median(swapping), 2),
        "p99_before_ms": round(1000 * p99(before), 2),
        "p99_during_ms": round(1000 * p99(swapping), 2),
        "p99_ratio": round(ratio, 3),
        "p99_ratio_of_rounds": round(statistics.median(by_round), 3),
        "met": ratio <= AIM,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rate", type=float, default=50.0, help="Requests a second for each model.")
    parser.add_argument("--first", type=float, default=0.05, help="Seconds to a worker's first token.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    host = machine.host()
    loads, quiet, during = asyncio.run(measure(arguments.rounds, arguments.rate, arguments.first))
    result = {
        "machine": host,
        "gateways": GATEWAYS,
        "users": USERS,
        "rounds": arguments.rounds,
        "rate_per_model": arguments.rate,
        "first_token_of_workers_ms": 1000 * arguments.first,
        "seconds_per_swap": round(statistics.median(end - start for start, end in during), 2),
        "aim_p99_ratio": AIM,
        "users_of_the_other_model": compared(loads[OTHER], quiet, during),
        "users_of_the_swapped_model": compared(loads[SWAPPED], quiet, during),
    }
    machine.publish(result, arguments.out)


if __name__ == "__main__":
    main()
