"""The worker as a process: sockets, signals, exit codes. The engine process is real, its model is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.worker.fake_engine import events

FAKE = [sys.executable, "-m", "tests.worker.fake_worker"]
OPTIONS = ["--model", "fake", "--served-model-name", "m"]
LONG = {"model": "m", "prompt": "x", "max_tokens": 200, "stream": True}  # four seconds


class Worker:
    """A worker on a Unix socket, and a client for it."""

    def __init__(self, process: subprocess.Popen[str], uds: Path) -> None:
        self.process = process
        self.uds = uds
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(uds), verify=False), base_url="http://worker", timeout=60
        )

    def wait_status(self, path: str, status: int) -> httpx.Response:
        return wait_for(lambda: self.status_is(path, status))

    def status_is(self, path: str, status: int) -> httpx.Response | None:
        assert self.process.poll() is None, self.process.communicate()[1]
        try:
            answer = self.client.get(path)
        except httpx.TransportError:
            return None
        return answer if answer.status_code == status else None

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def exit(self) -> tuple[int, str]:
        """Exit code and log, once it has ended."""
        _, log = self.process.communicate(timeout=150)
        return self.process.returncode, log


def wait_for(condition: Callable[[], Any], seconds: float = 150.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.02)
    return value


@contextmanager
def worker(
    tmp_path: Path, *options: str, before: tuple[str, ...] = (), ready: bool = True
) -> Iterator[Worker]:
    uds = tmp_path / "w.sock"
    process = subprocess.Popen(
        [*FAKE, *before, *OPTIONS, "--uds", str(uds), *options], stderr=subprocess.PIPE, text=True
    )
    started = Worker(process, uds)
    try:
        if ready:
            started.wait_status("/ready", 200)
        yield started
    finally:
        started.client.close()
        process.kill()
        process.wait()


def stream_in_background(worker: Worker) -> tuple[threading.Thread, list[str], threading.Event]:
    """Starts a long stream on its own thread; its text comes into the list, the event says that it runs."""
    texts: list[str] = []
    running = threading.Event()

    def read() -> None:
        transport = httpx.HTTPTransport(uds=str(worker.uds), verify=False)
        with httpx.Client(transport=transport, base_url="http://worker", timeout=60) as client:
            with client.stream("POST", "/v1/completions", json=LONG) as answer:
                parts = []
                for part in answer.iter_text():
                    running.set()
                    parts.append(part)
                texts.append("".join(parts))

    thread = threading.Thread(target=read)
    thread.start()
    assert running.wait(60)
    return thread, texts, running


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FAKE, *arguments], capture_output=True, text=True, timeout=150, check=False)


def test_port_in_use_is_exit_2_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_to_end(*OPTIONS, "--port", str(port))
    assert ended.returncode == 2
    assert f"port {port}: Address already in use" in ended.stderr


def test_socket_of_a_living_process_is_not_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(tmp_path / "w.sock"))
        living.listen()
        ended = run_to_end(*OPTIONS, "--uds", str(tmp_path / "w.sock"))
    assert ended.returncode == 2
    assert "Address already in use" in ended.stderr


def test_invalid_options_are_exit_2_all_at_once() -> None:
    ended = run_to_end(*OPTIONS, "--max-num-seqs", "0", "--block-size", "7", "--bogus", "--trust-remote-code")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 4


def test_a_model_that_is_not_there_is_exit_2() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "worker", "--model", "/nowhere/model.gguf", "--port", "0"],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "/nowhere/model.gguf" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_hub_that_cannot_be_reached_is_exit_1(tmp_path: Path) -> None:
    """The supervisor tries that again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-m", "worker", "--model", "org/model", "--port", "0"],
            env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert endpoint in ended.stderr


def test_socket_left_by_a_dead_process_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "w.sock"))
    with worker(tmp_path) as running:
        running.process.terminate()
        assert running.exit()[0] == 0
        assert not running.uds.exists()


def test_serves_health_and_progress_while_it_loads(tmp_path: Path) -> None:
    with worker(tmp_path, before=("--load-seconds", "30"), ready=False) as loading:
        loading.wait_status("/health", 200)
        wait_for(lambda: loading.client.get("/ready").json()["phase"] == "weights")
        answer = loading.client.get("/ready")
        assert (answer.status_code, answer.json()["done"], answer.json()["total"]) == (503, 1, 2)
        refused = loading.client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        engine = loading.engine()
        loading.process.terminate()
        assert loading.exit()[0] == 0
        assert not engine.is_running()


def test_sigterm_does_not_wait_for_a_download(tmp_path: Path) -> None:
    with worker(tmp_path, before=("--find-seconds", "300"), ready=False) as finding:
        finding.wait_status("/ready", 503)
        answer = wait_for(lambda: (b := finding.client.get("/ready").json())["phase"] == "download" and b)
        assert (answer["done"], answer["total"]) == (5, 9)
        finding.process.terminate()
        assert finding.exit()[0] == 0


def test_sigterm_finishes_streams_refuses_new_requests_and_exits_0(tmp_path: Path) -> None:
    with worker(tmp_path) as running:
        engine = running.engine()
        thread, texts, _ = stream_in_background(running)
        running.process.terminate()
        refused = wait_for(lambda: refusal(running))
        assert refused.headers["x-pagefleet-refused"] == "draining"
        thread.join(60)
        chunks = events(texts[0])
        assert chunks[-1] == "[DONE]"
        assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks[:-1]) == 200
        code, log = running.exit()
        assert code == 0
        assert "SIGTERM: draining" in log
        assert not engine.is_running()


def refusal(running: Worker) -> httpx.Response | None:
    answer = running.client.post("/tokenize", json={"model": "m", "prompt": "x"})
    return answer if answer.status_code == 503 else None


def test_drain_limit_ends_streams_with_an_error(tmp_path: Path) -> None:
    with worker(tmp_path, "--shutdown-timeout", "200ms") as running:
        thread, texts, _ = stream_in_background(running)
        running.process.terminate()
        thread.join(60)
        last = events(texts[0])[-1]
        assert last["error"]["code"] == "shutting_down"
        assert "200ms" in last["error"]["message"]
        assert running.exit()[0] == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_aborts(tmp_path: Path, second: signal.Signals) -> None:
    with worker(tmp_path) as running:
        thread, texts, _ = stream_in_background(running)
        running.process.send_signal(signal.SIGINT)
        wait_for(lambda: refusal(running))
        running.process.send_signal(second)
        thread.join(60)
        assert events(texts[0])[-1]["error"]["code"] == "shutting_down"
        assert running.exit()[0] == 0


def test_death_of_the_engine_is_answered_then_exit_1(tmp_path: Path) -> None:
    with worker(tmp_path) as running:
        thread, texts, _ = stream_in_background(running)
        running.engine().kill()
        thread.join(60)
        assert events(texts[0])[-1]["error"]["code"] == "engine_dead"
        assert "[DONE]" not in texts[0]
        code, log = running.exit()
        assert code == 1
        assert "signal 9" in log


@pytest.mark.parametrize(("fail", "code"), [("once", 1), ("always", 2)])
def test_an_engine_that_can_never_start_is_exit_2(fail: str, code: int) -> None:
    ended = run_to_end("--fail", fail, *OPTIONS, "--port", "0")
    assert ended.returncode == code
    assert "the engine did not start: the KV cache is too small" in ended.stderr


def test_ends_with_the_parent_it_was_given(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with worker(tmp_path, "--parent-pid", str(parent.pid)) as running:
            engine = running.engine()
            parent.kill()
            parent.wait()
            code, log = running.exit()
            assert code == 1
            assert f"process {parent.pid} (--parent-pid) is gone" in log
            assert not engine.is_running()
    finally:
        parent.kill()
        parent.wait()


def test_a_parent_that_is_gone_already_is_noticed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with worker(tmp_path, "--parent-pid", str(gone.pid), ready=False) as running:
        assert running.exit()[0] == 1


def test_admin_over_the_unix_socket_and_nothing_private_in_the_log(tmp_path: Path) -> None:
    with worker(tmp_path, "--slot", "m-0", "--generation", "3") as running:
        body = running.client.get("/internal/whoami").json()
        assert body == {"slot": "m-0", "generation": 3, "model": "m", "pid": running.process.pid}
        body = {"model": "m", "prompt": "very private"}
        assert running.client.post("/v1/completions", json=body).status_code == 200
        assert running.client.post("/admin/drain").json()["draining"]
        os.kill(running.process.pid, signal.SIGTERM)
        code, log = running.exit()
        assert code == 0
        assert "private" not in log
        assert "GET" not in log
