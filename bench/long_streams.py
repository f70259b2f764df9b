"""Streams that are longer than a swap: each must end whole, on the version on which it began.

    python -m bench.long_streams --out bench/results/long_streams.json

Under a real systemd: three gateway processes, workers without a model, half of the streams through a real
nginx with the configuration that `pagefleet nginx render` makes. When all streams have begun, the model is
swapped under them; the old version must stay until the last of them has ended. The supervisor is killed while
it waits for that. Other users go on all the while, and are on the new version within seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import machine
from bench.soak_fleet import SoakFleet, soak_fleet
from bench.soak_load import account, ask, loaded
from bench.soak_worker import DONE, event
from gateway.config import load_fleet
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.nginx import render
from gateway.fleet.rollout import Options, Rollout
from tests.gateway.nginx_server import Nginx, standalone
from tests.gateway.numbered_load import USERS, Load
from tests.gateway.rig import CHAT
from tests.gateway.user_manager import user_manager

GATEWAYS = 3
MODEL = "m"
PER_EVENT = 0.1
FIRST_NUMBER = 1_000_000_000  # beyond those of the other users' requests


@dataclass
class Stream:
    """One answer: when each piece of it came (time.monotonic), who gave it, what is wrong with it."""

    number: int
    arrivals: list[float] = field(default_factory=list)
    target: str = ""
    why: str = ""

    async def read(self, client: httpx.AsyncClient, seconds: float) -> None:
        events = round(seconds / PER_EVENT)
        body = {"model": MODEL, "user": f"long{self.number}", "number": self.number, "stream": True}
        expected = b"".join(event(self.number, place) for place in range(events)) + DONE
        answer = b""
        try:
            asked = {**body, "events": events, "pause": PER_EVENT}
            async with client.stream("POST", CHAT, json=asked) as response:
                self.target = response.headers.get("x-pagefleet-target", "")
                async for piece in response.aiter_raw():
                    self.arrivals.append(time.monotonic())
                    answer += piece
        except httpx.HTTPError as error:
            self.why = repr(error)
        if not self.why and answer != expected:
            self.why = f"{len(answer)} bytes for {len(expected)}, the last are {answer[-100:]!r}"

    @property
    def seconds(self) -> float:
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:])), default=0.0)


async def measure(count: int, seconds: float, at_a_time: int) -> dict[str, Any]:
    """The whole of it, as it is shown."""
    with user_manager() as manager:
        async with soak_fleet(manager, GATEWAYS, {MODEL: 1}) as fleet:
            folder = fleet.state.root.parent
            nginx = Nginx(folder)
            nginx.write(render(load_fleet(folder / "fleet.yaml"), standalone(listen=nginx.listen)))
            async with nginx.running():
                pids = nginx.pids()
                ports = (fleet.port, nginx.port)
                streams = [Stream(FIRST_NUMBER + number) for number in range(count)]
                load = Load(fleet.connect, ask, at_a_time=at_a_time)
                async with loaded(load):
                    reading = [
                        asyncio.create_task(_through(ports[place % 2], one, seconds))
                        for place, one in enumerate(streams)
                    ]
                    while not all(one.arrivals or one.why for one in streams):
                        await asyncio.sleep(0.05)
                    rollout, moved = await _swap(fleet, load, streams)
                    await asyncio.gather(*reading)
                untouched = nginx.pids() == pids
            return {
                "seconds_per_stream": seconds,
                **_of_streams(streams),
                **_of_the_swap(rollout, streams, moved),
                "nginx_processes_untouched": untouched,
                "other_users": _of_others(load, fleet.worked),
            }


async def _through(port: int, one: Stream, seconds: float) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        await one.read(client, seconds)


async def _swap(fleet: SoakFleet, load: Load, streams: Sequence[Stream]) -> tuple[Rollout, float]:
    """To its end, and the seconds until only these streams were on the old version."""
    began = time.monotonic()
    options = Options(steps=(50.0, 100.0), hold=1.0)
    await fleet.begin_swap(MODEL, StartRequest(source="fake/other", options=options))
    while (await asyncio.to_thread(fleet.swaps.status, MODEL)).rollout.phase != "clearing":
        await asyncio.sleep(0.1)
    moved = time.monotonic() - began
    whole = len(load.whole)
    while len(load.whole) < whole + 100:
        await asyncio.sleep(0.1)
    await fleet.kill_supervisor()
    deadline = time.monotonic() + 2 * max(60.0, streams[0].seconds) + 900.0
    while time.monotonic() < deadline:
        try:
            return await fleet.swap_ended(MODEL), moved
        except TimeoutError:  # it waits for the streams
            continue
    raise TimeoutError("the swap doesn't end")


def _of_streams(streams: Sequence[Stream]) -> dict[str, Any]:
    return {
        "streams": len(streams),
        "of_which_through_nginx": len(streams) // 2,
        "whole": sum(not one.why for one in streams),
        "not_whole": [f"{one.number}: {one.why}" for one in streams if one.why][:20],
        "answered_by": dict(Counter(one.target for one in streams)),
        "shortest_s": round(min(one.seconds for one in streams), 2),
        "longest_s": round(max(one.seconds for one in streams), 2),
        "longest_gap_s": round(max(one.longest_gap for one in streams), 3),
        "pause_between_events_s": PER_EVENT,
    }


def _of_the_swap(rollout: Rollout, streams: Sequence[Stream], moved: float) -> dict[str, Any]:
    last = max(one.arrivals[-1] for one in streams if one.arrivals)
    gone = time.monotonic() - (time.time() - (rollout.ended or 0.0))
    return {
        "swap": rollout.outcome,
        "seconds_of_swap": round((rollout.ended or 0.0) - rollout.started, 1),
        "seconds_until_all_new_requests_were_on_the_new_version": round(moved, 1),
        "old_version_gone_after_the_last_stream_s": round(gone - last, 2),
        "streams_cut": rollout.cut,
        "supervisors_killed_meanwhile": 1,
    }


def _of_others(load: Load, worked: Path) -> dict[str, Any]:
    found = account(load, (), worked).shown()
    return {name: found[name] for name in ("requests", "whole", "failed_otherwise", "first_of_those")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0, help="Of each stream.")
    parser.add_argument("--in-flight", type=int, default=10, help="Other users' requests.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    host = machine.host()
    found = asyncio.run(measure(arguments.streams, arguments.seconds, arguments.in_flight))
    machine.publish({"machine": host, "gateways": GATEWAYS, "users": USERS, **found}, arguments.out)


if __name__ == "__main__":
    main()
