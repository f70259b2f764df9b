"""One worker and one gateway in front of it, for the whole session. Every case goes through the gateway,
which passes a worker's answers on byte by byte; what both answer themselves is asked of the worker too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from tests.conftest import ROOT
from worker.text.tokenizer import Tokenizer

MODEL = "smollm2"
MAX_MODEL_LEN = 512
START_SECONDS = 200.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    """A running process: `url` without /v1, `pid` of the leader of its own process group."""

    url: str
    pid: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(module: str, arguments: list[str], port: int, log: Path) -> Iterator[Served]:
    """`python -m module` until it is ready; afterwards it and everything it started are gone."""
    command = [
        sys.executable,
        "-m",
        module,
        *arguments,
        "--port",
        str(port),
        "--parent-pid",
        str(os.getpid()),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log)
        yield Served(url, process.pid)
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"{url} ended with code {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(f"{url}/ready", timeout=5, verify=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"{url} was not ready within {START_SECONDS:.0f} s:\n{log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    # The group outlives its leader if anything was left behind.
    left_over = _kill_group(process.pid)
    process.wait()
    assert code == 0, f"exit code {code} after SIGTERM"
    assert not left_over, "processes were left behind"


def _kill_group(group: int) -> bool:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="session")
def worker(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = {
        "model": str(demo_model),
        "served-model-name": MODEL,
        "max-model-len": str(MAX_MODEL_LEN),
        "tool-call-parser": "hermes",  # the model's template has no place for tools
        "kv-cache-memory-bytes": "128MiB",
        # On a machine that others use as well, two threads wait for each other more than they help.
        "threads": "1",
        "shutdown-timeout": "10s",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    log = tmp_path_factory.mktemp("worker") / "log"
    with served("worker", arguments, free_port(), log) as process:
        yield process


@contextmanager
def gateway_to(worker: Served, model: str, source: str, folder: Path) -> Iterator[Served]:
    """A gateway whose one model is on `worker`."""
    fleet = {
        "supervisor": {"state_dir": str(folder / "state")},
        "models": [{"name": model, "source": source}],
    }
    (folder / "fleet.yaml").write_text(json.dumps(fleet))
    target = Target(slot="standalone", generation=0, address=worker.url, state="ready")
    write_routes(
        folder / "routes.json",
        RoutesFile(epoch=1, models={model: Routes(model=model, epoch=1, targets=(target,))}),
    )
    arguments = ["--config", str(folder / "fleet.yaml"), "--routes", str(folder / "routes.json")]
    with served("gateway", arguments, free_port(), folder / "log") as process:
        yield process


@pytest.fixture(scope="session")
def gateway(worker: Served, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with gateway_to(worker, MODEL, str(demo_model), tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a gateway to a worker whose model says what it is asked to (scripted_worker.py)."""
    folder = tmp_path_factory.mktemp("scripted")
    arguments = ["--model", "scripted", "--shutdown-timeout", "10s"]
    with (
        served("tests.conformance.scripted_worker", arguments, free_port(), folder / "worker-log") as worker,
        gateway_to(worker, "scripted", "random:scripted", folder) as process,
        OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=100) as client,
    ):
        yield client


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "url" in metafunc.fixturenames:
        both = metafunc.module.__name__.rpartition(".")[2] in ("test_errors", "test_models")
        metafunc.parametrize(
            "url", ["worker", "gateway"] if both else ["gateway"], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    """Where the process under test answers, without /v1."""
    process: Served = request.getfixturevalue(request.param)
    return process.url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=100) as client:
        yield client


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=100) as client:
        yield client


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    """Plain HTTP for what the SDK can't send or hides."""
    with httpx.Client(base_url=url, timeout=100) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_path(demo_model)


@pytest.fixture(scope="session")
def references(reference_tokens: Path) -> dict[str, dict[str, Any]]:
    """Prompts by name, with their greedy float32 tokens."""
    return {prompt["name"]: prompt for prompt in json.loads(reference_tokens.read_text())["prompts"]}


def running_requests(worker: Served) -> float:
    """Sequences that the engine works on or has waiting, from the worker's own metrics."""
    text = httpx.get(f"{worker.url}/metrics", timeout=10, verify=False).text
    names = ("pagefleet_num_requests_running", "pagefleet_num_requests_waiting")
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(names)]
    assert len(values) == 2, text
    return sum(map(float, values))


def wait_until_idle(worker: Served, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while (running := running_requests(worker)) > 0:
        assert time.monotonic() < deadline, f"{running:.0f} sequences still run"
        time.sleep(0.05)
