"""A fleet under a real systemd: who outlives whom, who takes over, what the watchdog sees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import yaml
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from gateway.cli.swap_client import Swaps
from gateway.config import FleetFile, load_fleet
from gateway.fleet.admin import FleetStatus
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.ledger import make_ledger, this_machine
from gateway.fleet.listen import bind
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.state import read_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.systemd import SystemdOptions, memory_limit, render
from gateway.fleet.unit import UnitStatus
from tests.conftest import unavailable
from tests.control_group import memory_group
from tests.gateway.user_manager import UserManager, user_manager

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

JUDGE = {"min_requests": 5, "max_ttft_ratio": 20.0, "max_tpot_ratio": 20.0}  # the machine may be busy

GOLDEN = [{"prompt": "x", "expect": "A"}]

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]


class Fleet:
    """Units of a fleet file in a manager, and what may be asked of them."""

    def __init__(self, manager: UserManager, folder: Path) -> None:
        self.manager = manager
        self.folder = folder
        self.file = folder / "fleet.yaml"
        self.state = StateDir(folder / "state")
        (folder / "config.json").write_text(json.dumps(LLAMA))
        with bind("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def write(self, *models: str, aliases: Sequence[str] = (), **gateway: Any) -> None:
        """The fleet file and its units, with the supervisor of tests/gateway/systemd_fleet.py. `aliases`: of
        the first model."""
        source = f"random:{self.folder / 'config.json'}"
        worker = {"device": "cpu", "kv_cache_memory_bytes": "4MiB"}
        content: dict[str, Any] = {
            "gateway": {"port": self.port, "usage": False, **gateway},
            "supervisor": {
                "backend": "systemd",
                "state_dir": str(self.state.root),
                "stall_timeout": "2s",
                "drain_timeout": "15s",
            },
            "models": [
                {"name": name, "source": source, "worker": worker, "judge": JUDGE, "golden": GOLDEN}
                for name in models
            ],
        }
        content["models"][0]["aliases"] = list(aliases)
        self.file.write_text(yaml.safe_dump(content))
        for name, text in self.units_of(load_fleet(self.file)).items():
            (self.manager.units / name).write_text(text)
        argv = f"{sys.executable} -m tests.gateway.systemd_fleet up --detached {self.file}"
        self.manager.drop_in("pagefleet-supervisor.service", f"[Service]\nExecStart=\nExecStart={argv}\n")
        self.manager.drop_in("pagefleet-worker@.service", "[Service]\nWatchdogSec=6\n")
        self.manager.call("daemon-reload")

    def units_of(self, fleet: FleetFile) -> dict[str, str]:
        return render(fleet, SystemdOptions(self.file, ROOT, user_manager=True))

    def status(self) -> FleetStatus | None:
        transport = httpx.HTTPTransport(uds=str(self.state.admin_socket), verify=False)
        with httpx.Client(transport=transport, base_url="http://supervisor", timeout=10) as client:
            try:
                return msgspec.json.decode(client.get("/status").content, type=FleetStatus)
            except httpx.TransportError:
                return None

    def units(self) -> dict[str, UnitStatus]:
        status = self.status()
        return {unit.slot: unit for unit in status.units} if status else {}

    def until_ready(self, **generations: int) -> dict[str, UnitStatus]:
        def ready() -> dict[str, UnitStatus] | None:
            units = self.units()
            wanted = {slot.replace("_", "-"): number for slot, number in generations.items()}
            is_there = all(
                slot in units and units[slot].generation >= number for slot, number in wanted.items()
            )
            return units if units and is_there and self.are_ready(units.values()) else None

        return self.until(ready)

    def are_ready(self, units: Collection[UnitStatus]) -> bool:
        """For the supervisor, and for systemd, which is told a moment later."""
        if any(unit.state != "ready" for unit in units):
            return False
        names = [f"pagefleet-{unit.role}@{unit.slot}.service" for unit in units]
        return self.manager.call("is-active", *names, check=False).split() == ["active"] * len(names)

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert time.monotonic() < deadline, self.account()
            time.sleep(0.1)
        return value

    def account(self) -> str:
        logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self.state.logs.glob("*.log"))
        return f"{self.units()}\n{self.rollouts()}\n{logs}\n{self.manager.log.read_text()[-3000:]}"

    def rollouts(self) -> tuple[Rollout, ...]:
        status = self.status()
        return status.rollouts if status is not None else ()

    def pagefleet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "gateway.cli", *arguments, "--state-dir", str(self.state.root)]
        return subprocess.run(
            argv,
            cwd=ROOT,
            env=self.manager.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def is_listening(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def ask(self, model: str, tokens: int = 3, **options: Any) -> httpx.Response:
        body = {"model": model, "prompt": "x", "max_tokens": tokens, **options}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, verify=False)


@pytest.fixture(scope="module")
def manager() -> Iterator[UserManager]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(user_manager())
        except OSError as error:
            unavailable(str(error))


@pytest.fixture(scope="module")
def fleet(manager: UserManager, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """One for all tests, since starting it takes seconds; each finds it up and ready."""
    fleet = Fleet(manager, tmp_path_factory.mktemp("fleet"))
    fleet.write("a", "b")
    fleet.manager.call("start", "pagefleet.target")
    return fleet


@contextlib.contextmanager
def load(fleet: Fleet, *models: str) -> Iterator[Counter[str]]:
    """Requests, streamed and not, one after another from two clients; how each ended."""
    outcomes: Counter[str] = Counter()
    over = threading.Event()

    def ask() -> None:
        number = 0
        with httpx.Client(base_url=fleet.url, timeout=60, verify=False) as client:
            while not over.is_set():
                number += 1
                stream = number % 2 == 0
                body = {
                    "model": models[number % len(models)],
                    "prompt": "x",
                    "max_tokens": 10,
                    "stream": stream,
                }
                try:
                    answer = client.post("/v1/completions", json=body)
                    whole = answer.text.rstrip().endswith("[DONE]") if stream else "AAAAAAAAAA" in answer.text
                    outcomes["whole" if answer.status_code == 200 and whole else answer.text[:300]] += 1
                except httpx.TransportError as error:
                    outcomes[repr(error)] += 1

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def streams(fleet: Fleet, generation: int) -> Iterator[list[httpx.Response]]:
    """Two streams of three seconds that slot a-0 has in work; at the end, their answers."""
    answers: list[httpx.Response] = []
    clients = [
        threading.Thread(target=lambda: answers.append(fleet.ask("a", 150, stream=True))) for _ in range(2)
    ]
    for client in clients:
        client.start()
    path = fleet.state.run / f"a-0.{generation}.sock"
    transport = httpx.HTTPTransport(uds=str(path), verify=False)
    with httpx.Client(transport=transport, base_url="http://worker", timeout=20) as worker:
        fleet.until(lambda: worker.get("/health").json()["inflight"] == 2)
    yield answers
    for client in clients:
        client.join()


def tokens_of(answer: httpx.Response) -> int:
    """Of a stream that came to its end; a slow reader's come several at once."""
    assert answer.text.rstrip().endswith("[DONE]"), answer.text[-300:]
    return len("".join(re.findall(r'"text":"(A*)"', answer.text)))


def pids(units: dict[str, UnitStatus]) -> dict[str, int | None]:
    return {slot: unit.pid for slot, unit in units.items()}


def test_the_supervisor_may_be_killed_or_replaced_under_load(fleet: Fleet) -> None:
    before = fleet.until_ready()
    assert set(before) == {"gateway", "a-0", "b-0"}
    assert fleet.manager.pid("pagefleet-worker@a-0.service") == before["a-0"].pid
    epoch = read_routes(fleet.state.routes).epoch
    with load(fleet, "a", "b") as outcomes:
        for end in ("kill --signal=SIGKILL", "restart"):
            status = fleet.status()
            assert status is not None
            if "KILL" in end:
                os.kill(status.supervisor, signal.SIGSTOP)  # it would mend the file
                fleet.state.routes.write_text("{")  # as a disk may leave it
            fleet.manager.call(*end.split(), "pagefleet-supervisor.service")
            fleet.until(lambda old=status: (now := fleet.status()) and now.supervisor != old.supervisor)
            assert pids(fleet.until_ready()) == pids(before)
            seen = outcomes["whole"]
            fleet.until(lambda seen=seen: outcomes["whole"] > seen + 4)
    assert list(outcomes) == ["whole"]
    routes = read_routes(fleet.state.routes)
    assert routes.epoch > epoch, "gateways that outlived the file would seem to have applied another one"
    assert [target.id for model in routes.models.values() for target in model.targets] == ["a-0.1", "b-0.1"]


def test_what_dies_comes_back_also_what_died_without_a_supervisor(fleet: Fleet) -> None:
    before = fleet.until_ready()
    limit = memory_limit(make_ledger(load_fleet(fleet.file), this_machine()).workers[0])
    for slot in ("a-0", "b-0"):
        unit = fleet.manager.show(f"pagefleet-worker@{slot}.service", "MemoryMax")
        assert unit == {"MemoryMax": str(limit)}
    (engine,) = psutil.Process(before["a-0"].pid).children()
    with load(fleet, "b") as outcomes:
        os.kill(before["a-0"].pid or 0, signal.SIGKILL)
        after = fleet.until_ready(a_0=before["a-0"].generation + 1)
    assert list(outcomes) == ["whole"]
    assert "SIGKILL" in (after["a-0"].last_exit or "")
    assert not engine.is_running()
    assert fleet.ask("a").status_code == 200
    assert pids(after)["b-0"] == pids(before)["b-0"]

    fleet.manager.call("stop", "pagefleet-supervisor.service")
    for slot in ("a-0", "gateway"):
        os.kill(after[slot].pid or 0, signal.SIGKILL)
    waiting: list[int] = []
    client = threading.Thread(target=lambda: waiting.append(fleet.ask("b").status_code))
    client.start()  # nobody takes the connection yet; systemd has the socket
    time.sleep(0.3)
    assert waiting == []
    fleet.manager.call("start", "pagefleet-supervisor.service")
    last = fleet.until_ready(a_0=after["a-0"].generation + 1, gateway=2)
    client.join()
    assert waiting == [200]
    assert last["b-0"].pid == before["b-0"].pid


def test_the_watchdog_ends_an_engine_that_hangs_and_a_server_that_does(fleet: Fleet) -> None:
    units = fleet.until_ready()
    assert fleet.ask("a", tokens=400).status_code == 200  # eight seconds of work, over the watchdog's time
    assert pids(fleet.units()) == pids(units)
    (engine,) = psutil.Process(units["a-0"].pid).children()
    engine.suspend()
    hung = threading.Thread(target=lambda: fleet.ask("a"))
    hung.start()
    os.kill(units["b-0"].pid or 0, signal.SIGSTOP)
    generations = {"a_0": units["a-0"].generation + 1, "b_0": units["b-0"].generation + 1}
    after = fleet.until_ready(**generations)
    hung.join()
    assert not engine.is_running()
    for slot in ("a-0", "b-0"):
        assert "no sign of life" in (after[slot].last_exit or ""), slot
        assert fleet.ask(slot[0]).status_code == 200


def test_stopping_a_worker_drains_it(fleet: Fleet) -> None:
    units = fleet.until_ready()
    with streams(fleet, units["a-0"].generation) as answers:
        fleet.manager.call("stop", "pagefleet-worker@a-0.service")  # returns at the end: three seconds
    assert [tokens_of(answer) for answer in answers] == [150, 150]
    after = fleet.until_ready(a_0=units["a-0"].generation + 1)
    assert after["a-0"].restarts == units["a-0"].restarts  # it was asked to end


def test_another_fleet_file_ends_what_it_does_not_want_and_keeps_the_rest(fleet: Fleet) -> None:
    before = fleet.until_ready()
    fleet.manager.call("stop", "pagefleet-supervisor.service")
    fleet.write("a", "c", aliases=["nick"], queue={"size": 7})
    with load(fleet, "a") as outcomes:
        fleet.manager.call("start", "pagefleet-supervisor.service")
        after = fleet.until_ready(gateway=before["gateway"].generation + 1)
    assert list(outcomes) == ["whole"]
    assert set(after) == {"gateway", "a-0", "c-0"}
    assert after["a-0"].pid == before["a-0"].pid
    fleet.until(lambda: not psutil.pid_exists(before["b-0"].pid or 0))
    assert {name: fleet.ask(name).status_code for name in ("a", "nick", "b", "c")} == {
        **dict.fromkeys(("a", "nick", "c"), 200),
        "b": 404,
    }


def test_a_swap_goes_on_after_the_supervisor_was_killed_and_loses_nothing(fleet: Fleet) -> None:
    before = fleet.until_ready()
    options = ["--set", "max_num_seqs=4", "--steps", "50%,100%", "--hold", "1s", "--detach"]
    source = ["--to", f"random:{fleet.folder / 'config.json'}"]
    with load(fleet, "c") as outcomes:
        begun = fleet.pagefleet("swap", "start", "c", *source, *options)
        assert begun.returncode == 0, begun.stderr
        fleet.until(lambda: any(rollout.terminal or rollout.standby_bp for rollout in fleet.rollouts()))
        new = [unit for unit in fleet.units().values() if unit.variant]
        assert len(new) == 1, fleet.account()
        status = fleet.status()
        assert status is not None
        fleet.manager.call("kill", "--signal=SIGKILL", "pagefleet-supervisor.service")
        fleet.until(lambda: (now := fleet.status()) and now.supervisor != status.supervisor)
        fleet.until(lambda: any(rollout.terminal for rollout in fleet.rollouts()))
        assert [rollout.phase for rollout in fleet.rollouts()] == ["completed"], fleet.account()
        after = fleet.until_ready()
        seen = outcomes["whole"]
        fleet.until(lambda: outcomes["whole"] > seen + 4)
    assert list(outcomes) == ["whole"]
    assert set(after) == {"gateway", "a-0", new[0].slot}
    assert after[new[0].slot].pid == new[0].pid
    assert not psutil.pid_exists(before["c-0"].pid or 0)


@pytest.fixture
def starved() -> Iterator[Path]:
    """A control group whose processes the kernel ends when they want more than 4 MiB."""
    with memory_group(4 << 20) as group:
        yield group


def test_a_standby_killed_for_want_of_memory_goes_back_and_says_so(fleet: Fleet, starved: Path) -> None:
    """By the kernel, as under a MemoryMax, which a user's manager can't set everywhere."""
    before = fleet.until_ready()
    options = Options(steps=(50.0, 100.0), hold=60.0, probes=False)
    Swaps(fleet.state).start("c", StartRequest(set={"max_num_seqs": 8}, options=options))
    fleet.until(lambda: fleet.rollouts()[0].phase == "judging")
    (new,) = set(fleet.units()) - set(before)
    unit = fleet.units()[new]
    (starved / "cgroup.procs").write_text(str(unit.pid))
    transport = httpx.HTTPTransport(uds=str(fleet.state.run / f"{new}.{unit.generation}.sock"), verify=False)
    with httpx.Client(transport=transport, timeout=60) as client, contextlib.suppress(httpx.TransportError):
        client.post("http://worker/v1/completions", json={"model": "c", "prompt": "x" * (16 << 20)})
    fleet.until(lambda: fleet.rollouts()[0].terminal)
    rollout = fleet.rollouts()[0]
    assert (rollout.phase, rollout.exit_code) == ("rolled_back", 4)
    assert f"the standby crashed: {new} " in rollout.reason
    assert "want of memory" in rollout.reason
    for command in ("status", "history"):
        words = ["swap", command, "c", "--state-dir", str(fleet.state.root)]
        shown = CliRunner().invoke(pagefleet, words)
        assert (shown.exit_code, rollout.reason in shown.output) == (0, True), shown.output
    assert pids(fleet.until_ready()) == pids(before)
    assert fleet.ask("c").status_code == 200


def test_stopping_the_target_lets_requests_end_and_leaves_nothing(fleet: Fleet) -> None:
    units = fleet.until_ready()
    with streams(fleet, units["a-0"].generation) as answers:
        fleet.manager.call("stop", "pagefleet.target")
    assert [tokens_of(answer) for answer in answers] == [150, 150]
    listed = ("list-units", "--state=active,deactivating", "--plain", "--no-legend", "pagefleet*")
    fleet.until(lambda: fleet.manager.call(*listed) == "")
    assert not any(psutil.pid_exists(unit.pid or 0) for unit in units.values())


def test_down_ends_everything_also_what_a_supervisor_has_left(fleet: Fleet) -> None:
    fleet.write("a")
    for unit_that_ends in (None, "pagefleet-supervisor.service"):
        fleet.manager.call("start", "pagefleet.target")
        units = fleet.until_ready()
        assert fleet.ask("a").status_code == 200
        if unit_that_ends is not None:
            fleet.manager.call("stop", unit_that_ends)
        with streams(fleet, units["a-0"].generation) as answers, ThreadPoolExecutor() as threads:
            ending = threads.submit(fleet.pagefleet, "down")
            fleet.until(lambda: not fleet.is_listening())
            assert not answers  # they go on, and the port is closed
            done = ending.result()
        assert [tokens_of(answer) for answer in answers] == [150, 150]
        assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
        assert not any(psutil.pid_exists(unit.pid or 0) for unit in units.values())
        assert not fleet.state.systemd.exists()
        assert not list(fleet.state.run.glob("*.sock"))
        with pytest.raises(httpx.ConnectError):
            fleet.ask("a")
