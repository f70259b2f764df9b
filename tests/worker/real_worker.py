"""`python -m worker` on a Unix socket, whole: for tests that need the real engine in its own process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import ROOT

START = 200.0  # seconds, on a very busy machine


class RealWorker:
    """A running worker, and a client for it."""

    def __init__(self, process: subprocess.Popen[bytes], uds: Path, log: Path) -> None:
        self.process = process
        self.uds = uds
        self.log = log
        self.server = psutil.Process(process.pid)
        transport = httpx.HTTPTransport(uds=str(uds), verify=False)
        self.client = httpx.Client(transport=transport, base_url="http://worker", timeout=100)

    @property
    def engine(self) -> psutil.Process:
        (child,) = self.server.children()
        return child

    def async_client(self, **limits: int) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self.uds), limits=httpx.Limits(**limits), verify=False)
        return httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=100)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "tiny", **fields})

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"pagefleet_{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    def busy(self) -> bool:
        """Whether the engine has anything left: a request, or a page held for one."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
        return any(self.metric(name) for name in names)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, START)


@contextmanager
def real_worker(directory: Path, model: Path, *options: str) -> Iterator[RealWorker]:
    """A worker that serves `model` as "tiny", until it is ready; killed at the end. `directory` holds its
    socket and log."""
    uds, log = directory / "w.sock", directory / "w.log"
    command = [
        *(sys.executable, "-m", "worker", "--model", str(model), "--served-model-name", "tiny"),
        *("--uds", str(uds), "--threads", "1", *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    worker = RealWorker(process, uds, log)
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.client.close()
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll until `condition` holds; the test fails when it doesn't in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("the condition did not come to hold")
        time.sleep(0.05)
