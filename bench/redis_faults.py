"""A Redis that is paused for half a minute, killed and restarted empty, under steady load on two gateways.

    python -m bench.redis_faults --out bench/results/redis_faults.json

Real gateway processes, a real redis-server and bench/fake_worker.py. A user whose limits are never reached
asks at a steady rate through all of it: none of these requests may be refused but by the policy `closed`, and
none with 429. In each phase another user sends 200 requests at once under a limit of 20 that never comes
back: what passes shows who counts (Redis 20 in all; `local` each gateway its half; `open` all; `closed`
none).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis

from bench import machine
from bench.fake_worker import MODEL
from bench.gateway_peers import _fleet, _pagefleet
from bench.http_load import PATH
from bench.proxy_process import Place, fake_worker, free_port, process

GATEWAYS = 2
RATE = 25.0  # requests a second to each gateway
BURST = 20
FLOOD = 200
AMPLE = {"qps": 1_000_000, "burst": 1_000_000, "concurrency": 1000}
LEASES = "pagefleet:{u:steady}:user:steady:concurrency"
POLICIES = ("local", "open", "closed")


@dataclass
class Phase:
    """What came of one phase. `settled`: seconds until all gateways had noticed that it began."""

    name: str
    seconds: float
    settled: float = 0.0
    flood_passed: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        ordered = sorted(self.latencies)
        return {
            "phase": self.name,
            "seconds": round(self.seconds, 1),
            "noticed_after_s": round(self.settled, 3),
            "statuses": dict(sorted(self.statuses.items())),
            "flood_passed": self.flood_passed,
            "p50_ms": round(1000 * statistics.median(ordered), 2),
            "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 2),
            "max_ms": round(1000 * ordered[-1], 2),
        }


class Redis:
    """A redis-server process, in memory only."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        where = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._place.folder)]
        command = ["redis-server", *where, "--save", ""]
        self._process = self._stack.enter_context(process(self._place, "redis", command, None))

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def close(self) -> None:
        self._stack.close()

    def leases(self) -> int:
        with redis.Redis(port=self._port) as client:
            return int(client.zcard(LEASES))


async def _steady(client: httpx.AsyncClient, now: Callable[[], Phase], stop: asyncio.Event) -> None:
    """Open loop: a request every 1 / RATE seconds, whatever became of those before."""
    running: set[asyncio.Task[None]] = set()

    async def one(phase: Phase) -> None:
        began = time.perf_counter()
        status = (await _ask(client, "steady")).status_code
        phase.statuses[status] += 1
        phase.latencies.append(time.perf_counter() - began)

    due = time.perf_counter()
    while not stop.is_set():
        task = asyncio.create_task(one(now()))
        running.add(task)
        task.add_done_callback(running.discard)
        due += 1 / RATE
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    await asyncio.gather(*running)


async def _ask(client: httpx.AsyncClient, user: str) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    return await client.post(PATH, json=body, headers={"x-user-id": user})


async def _all_degraded(clients: list[httpx.AsyncClient], expected: bool) -> float:
    """Seconds until every gateway says so."""
    began = time.perf_counter()
    wanted = f"pagefleet_gateway_limits_degraded {float(expected)}"
    for client in clients:
        while wanted not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)
    return time.perf_counter() - began


async def _flood(clients: list[httpx.AsyncClient], user: str) -> int:
    answers = await asyncio.gather(*(_ask(clients[i % len(clients)], user) for i in range(FLOOD)))
    return sum(answer.status_code == 200 for answer in answers)


async def faults(
    addresses: list[tuple[str, int]], server: Redis, paused: float, calm: float
) -> dict[str, Any]:
    """The phases, one after another, under load."""
    plan: list[tuple[str, float, bool, Callable[[], None]]] = [
        ("healthy", calm, False, lambda: None),
        ("paused", paused, True, lambda: server.signal(signal.SIGSTOP)),
        ("resumed", calm, False, lambda: server.signal(signal.SIGCONT)),
        ("killed", calm, True, server.kill),
        ("restarted empty", calm, False, server.start),
    ]
    phases = [Phase("start", 0)]
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=None)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=120, limits=limits)
            )
            for host, port in addresses
        ]
        load = [asyncio.create_task(_steady(client, lambda: phases[-1], stop)) for client in clients]
        for number, (name, seconds, degraded, act) in enumerate(plan):
            act()
            phase = Phase(name, seconds)
            phases.append(phase)
            phase.settled = await _all_degraded(clients, degraded)
            phase.flood_passed = await _flood(clients, f"flood-{number}")
            await asyncio.sleep(seconds)
        stop.set()
        await asyncio.gather(*load)
    await asyncio.sleep(0.5)
    shown = [phase.shown() for phase in phases[1:]]
    return {"phases": shown, "leases_left": server.leases()}


@contextlib.contextmanager
def fleet(place: Place, url: str, policy: str) -> Iterator[list[tuple[str, int]]]:
    """Addresses of the gateways, which have a state directory in common and the limit of the flood."""
    settings = {"redis_url": url, "limits": {"default": AMPLE, "on_redis_error": policy}}
    file = _fleet(place, settings, policy)
    now = time.time_ns() // 1000
    bounds = {"qps": 0.001, "burst": BURST}
    entries = {f"user:flood-{number}": {"at": now, "bounds": bounds} for number in range(5)}
    (file.parent / "limits.json").write_text(json.dumps(entries))
    with contextlib.ExitStack() as stack:
        names = [f"gateway-{policy}-{number}" for number in range(GATEWAYS)]
        yield [stack.enter_context(_pagefleet(place, name, file)).address for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paused", type=float, default=30.0, help="Seconds that Redis is paused.")
    parser.add_argument("--calm", type=float, default=5.0, help="Seconds of every other phase.")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {**machine.host(), "load_average": os.getloadavg()[0]},
        "gateways": GATEWAYS,
        "rate_per_gateway": RATE,
        "burst": BURST,
        "flood": FLOOD,
        "policies": {},
    }
    for policy in arguments.policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder))
            server = Redis(place)
            with contextlib.closing(server), fake_worker(place) as place.worker:
                server.start()
                with fleet(place, server.url, policy) as addresses:
                    outcome = asyncio.run(faults(addresses, server, arguments.paused, arguments.calm))
        result["policies"][policy] = outcome
        print(json.dumps({policy: outcome}, indent=1), flush=True)
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
