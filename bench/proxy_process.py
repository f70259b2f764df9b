"""Processes of a gateway bench: a proxy on one core, worker and load generator on the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from bench.http_load import Address, WrongAnswer, chat, closed_loop

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 90.0


@dataclass
class Place:
    """Where the parts of a measurement run; cores are None where it doesn't matter. `worker`: where the fake
    worker listens."""

    folder: Path
    proxy_core: int | None = None
    load_core: int | None = None
    worker: Address = ("127.0.0.1", 0)


@dataclass
class Way:
    """A way to the worker. `headers`: what its requests need; `process`: None for the direct way."""

    name: str
    address: Address
    version: str
    headers: str = ""
    process: subprocess.Popen[str] | None = None
    children: list[psutil.Process] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """Processor time of the proxy and its children so far."""
        times = [process.cpu_times() for process in self.children]
        return float(sum(time.user + time.system for time in times))

    def pause(self) -> None:
        """Nothing that an idle proxy does may disturb the measurement of another one."""
        for process in self.children:
            process.suspend()

    def resume(self) -> None:
        for process in self.children:
            process.resume()


Start = Callable[[Place], contextlib.AbstractContextManager[Way]]


@contextlib.contextmanager
def process(
    place: Place, name: str, command: list[str], core: int | None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Runs on one core from its first instruction on, if one is given; what it says goes to a file in the
    folder."""
    ours = os.sched_getaffinity(0)
    with (place.folder / f"{name}.log").open("ab") as log:
        os.sched_setaffinity(0, ours if core is None else {core})
        try:
            child = subprocess.Popen(
                command,
                **{"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "text": True, **options},
            )
        finally:
            os.sched_setaffinity(0, ours)
    try:
        yield child
    finally:
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for grandchild in psutil.Process(child.pid).children(recursive=True):
            grandchild.resume()
    child.send_signal(signal.SIGCONT)
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextlib.contextmanager
def proxy(
    place: Place, name: str, version: str, port: int, command: list[str], headers: str = "", **options: Any
) -> Iterator[Way]:
    with process(place, name, command, place.proxy_core, **options) as child:
        way = Way(name, ("127.0.0.1", port), version, headers, child)
        _await_answer(place, way)
        root = psutil.Process(child.pid)
        way.children = [root, *root.children(recursive=True)]
        try:
            yield way
        finally:
            for member in way.children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.resume()


def _await_answer(place: Place, way: Way) -> None:
    """Until a whole exchange with the worker goes right."""
    deadline = time.monotonic() + READY_SECONDS
    assert way.process is not None
    while True:
        try:
            closed_loop(way.address, chat(way.headers), 1, 0.0)
            return
        except (OSError, WrongAnswer, json.JSONDecodeError, KeyError) as error:
            log = (place.folder / f"{way.name}.log").read_text()[-2000:]
            if way.process.poll() is not None:
                raise RuntimeError(f"{way.name} ended with {way.process.returncode}:\n{log}") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"{way.name} isn't ready ({error}):\n{log}") from None
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def fake_worker(place: Place, *options: str) -> Iterator[Address]:
    """The worker, on the core of the load generator."""
    command = [sys.executable, "-m", "bench.fake_worker", *options]
    out = {"stdout": subprocess.PIPE, "cwd": ROOT}
    with process(place, "worker", command, place.load_core, **out) as child:
        yield "127.0.0.1", int(_line(child.stdout))


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


@contextlib.contextmanager
def place_on_cores() -> Iterator[Place]:
    """The proxy's core and the load's core, for a `with` block; this process moves to the latter."""
    ours = os.sched_getaffinity(0)
    proxy_core, load_core = _two_cores(ours)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), proxy_core, load_core)
        with fake_worker(place) as place.worker:
            os.sched_setaffinity(0, {load_core})
            try:
                yield place
            finally:
                os.sched_setaffinity(0, ours)


def _two_cores(allowed: set[int]) -> tuple[int, int]:
    """Two that don't share a physical core as its hardware threads, if there are such."""
    if len(allowed) < 2:
        raise RuntimeError("two cores are needed: one for the proxy, one for worker and load")
    first, *others = sorted(allowed)
    siblings = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    shared = _numbers(siblings.read_text()) if siblings.exists() else set()
    return first, next((core for core in others if core not in shared), others[0])


def _numbers(ranges: str) -> set[int]:
    """The kernel's way to write a set: `0-1,8`."""
    found: set[int] = set()
    for part in ranges.strip().split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found
