"""Clients that leave in the middle of their streams, for a long time: what does a gateway keep of them?

    python -m bench.abort_soak --out bench/results/abort_soak.json

A real gateway process in front of bench/fake_worker.py, which streams without end. Each client waits for its
first event and leaves, one in three with a reset; one in ten leaves at once. Afterwards nothing may be left:
no request in flight, no connection to the worker, no stream there. Memory is the gateway's resident size,
once a second; its slope is that of a least-squares line after the first fifth of the aborts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import socket
import statistics
import struct
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import machine
from bench.gateway_peers import WAYS
from bench.http_load import PATIENCE, Address, WrongAnswer, request_data
from bench.proxy_process import Place, Way, fake_worker

SAMPLE_SECONDS = 1.0
WARM_SHARE = 0.2
SETTLE_SECONDS = 30.0
WARM_ABORTS, WARM_SECONDS = 100, 2.0  # the files of usage are opened when there is some
CLEAN = ("inflight", "worker_streams", "worker_connections", "gateway_files")  # back to where they were
_RESET = struct.pack("ii", 1, 0)
_INFLIGHT = re.compile(r"^pagefleet_gateway_inflight\{.*\} (\S+)$", re.MULTILINE)
_LEFT = re.compile(r'^pagefleet_gateway_requests_total\{.*status="499".*\} (\S+)$', re.MULTILINE)


@dataclass
class Samples:
    """Resident bytes of the gateway over time, and how many aborts had been made."""

    process: psutil.Process
    at: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)

    def take(self, aborts: int) -> None:
        now = time.monotonic()
        if not self.at or now - self.at[-1] >= SAMPLE_SECONDS:
            self.at.append(now)
            self.bytes.append(self.process.memory_info().rss)
            self.aborts.append(aborts)

    def slope_mb_per_minute(self, total: int) -> float | None:
        """None when there are too few samples after the warm-up."""
        first = sum(aborts < WARM_SHARE * total for aborts in self.aborts)
        at, sizes = self.at[first:], self.bytes[first:]
        if len(at) < 5:
            return None
        return float(statistics.linear_regression(at, sizes).slope * 60 / 1e6)


def _leave_at_once(address: Address, request: bytes) -> None:
    with socket.create_connection(address, PATIENCE) as client:
        client.sendall(request)


def abort_streams(address: Address, request: bytes, total: int, at_once: int, samples: Samples) -> int:
    """Opens `total` streams, `at_once` at a time, and leaves each; how many had begun."""
    begun = opened = 0
    clients: dict[int, socket.socket] = {}
    with select.epoll() as poll:
        while opened < total or clients:
            while opened < total and len(clients) < at_once:
                opened += 1
                if opened % 10 == 0:
                    _leave_at_once(address, request)
                    continue
                client = socket.create_connection(address, PATIENCE)
                client.sendall(request)
                clients[client.fileno()] = client
                poll.register(client, select.EPOLLIN)
            ready = poll.poll(PATIENCE)
            if not ready and clients:
                raise WrongAnswer(f"no event for {PATIENCE:g} s, after {begun} aborted streams")
            for descriptor, _ in ready:
                data = clients[descriptor].recv(65536)
                if not data or (b"HTTP/1.1" in data and b" 200 " not in data):
                    raise WrongAnswer(f"after {begun} aborted streams: {data[:500]!r}")
                if b"data: " in data:  # else it was the head alone
                    client = clients.pop(descriptor)
                    begun += 1
                    if begun % 3 == 0:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    poll.unregister(client)
                    client.close()
            samples.take(opened)
    return begun


def remains(way: Way, worker: Address) -> dict[str, int]:
    """What is left of the streams, and what the gateway counted."""
    metrics = _get(way.address, "/metrics")
    stats = json.loads(_get(worker, "/stats"))
    return {
        "inflight": round(sum(map(float, _INFLIGHT.findall(metrics)))),
        "worker_streams": stats["streams"],
        "worker_connections": stats["connections"] - 1,  # without the one that asks
        "gateway_files": sum(process.num_fds() for process in way.children),
        "counted_as_left": round(sum(map(float, _LEFT.findall(metrics)))),
        "worker_saw_aborted": stats["aborted"],
    }


def _get(address: Address, path: str) -> str:
    with urllib.request.urlopen("http://{}:{}{}".format(*address, path), timeout=PATIENCE) as response:
        return str(response.read().decode())


def soak(way_name: str, total: int, at_once: int) -> dict[str, Any]:
    """One run. `clean`: nothing is left."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        with fake_worker(place, "--pause", "0.05") as place.worker, WAYS[way_name](place) as way:
            request = request_data(1_000_000, way.headers, stream=True)
            abort_streams(way.address, request, WARM_ABORTS, at_once, Samples(way.children[0]))
            time.sleep(WARM_SECONDS)
            before = remains(way, place.worker)
            samples = Samples(way.children[0])
            started = time.monotonic()
            begun = abort_streams(way.address, request, total, at_once, samples)
            seconds = time.monotonic() - started
            while True:
                after = remains(way, place.worker)
                clean = all(after[name] <= before[name] for name in CLEAN)
                if clean or time.monotonic() - started > seconds + SETTLE_SECONDS:
                    break
                time.sleep(0.1)
    return {
        "way": way_name,
        "aborts": total,
        "begun": begun,
        "seconds": seconds,
        "clean": clean,
        "before": before,
        "after": after,
        "rss_mb_first": samples.bytes[0] / 1e6,
        "rss_mb_last": samples.bytes[-1] / 1e6,
        "slope_mb_per_minute": samples.slope_mb_per_minute(total),
        "rss_mb": [round(size / 1e6, 2) for size in samples.bytes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=("pagefleet", "pagefleet-full"), default="pagefleet")
    parser.add_argument("--aborts", type=int, default=100_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    info = {**machine.host(), "load_average": os.getloadavg()[0]}
    result = {"machine": info, **soak(arguments.way, arguments.aborts, arguments.at_once)}
    print(json.dumps({key: value for key, value in result.items() if key != "rss_mb"}, indent=1))
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
