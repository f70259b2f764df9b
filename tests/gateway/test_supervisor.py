"""The supervisor over real processes that misbehave in chosen ways."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from gateway.cli.common import ask_supervisor
from gateway.config import FleetFile, load_fleet
from gateway.fleet import logs
from gateway.fleet.commands import Commands
from gateway.fleet.errors import Conflict, InvalidFleet
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.state import read_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.supervisor import Supervisor
from gateway.fleet.unit import Timing, UnitStatus
from tests.gateway.fake_fleet import FAST, FakeCommands

FAKE_FLEET = [sys.executable, str(Path(__file__).with_name("fake_fleet.py"))]
PATIENCE = 60.0  # the machine may be busy


def fleet_file(tmp_path: Path, *models: str, state_dir: Path | None = None, worker: str = "{}") -> Path:
    path = tmp_path / "fleet.yaml"
    lines = ["gateway: {port: 0}", f"supervisor: {{state_dir: {state_dir or tmp_path / 'state'}}}", "models:"]
    lines += [f"  - {{name: {model}, source: o/n, worker: {worker}}}" for model in models]
    path.write_text("\n".join(lines))
    return path


class Running:
    """A supervisor in this process, and every status it reported."""

    def __init__(self, fleet: FleetFile, timing: Timing, commands: FakeCommands) -> None:
        self.history: list[UnitStatus] = []
        self.supervisor = Supervisor(fleet, commands=commands, timing=timing, on_change=self.history.append)
        self.state = StateDir(fleet.supervisor.state_dir)
        self.instance = ""
        self.task: asyncio.Task[int]

    def unit(self, slot: str) -> UnitStatus:
        return next(unit for unit in self.supervisor.statuses if unit.slot == slot)

    def target(self, model: str) -> tuple[str, int]:
        target = read_routes(self.state.routes).models[model].targets[0]
        return target.state, target.generation

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_state(self, slot: str, state: str, generation: int = 1) -> None:
        await self.until(lambda: (self.unit(slot).state, self.unit(slot).generation) == (state, generation))


@contextlib.asynccontextmanager
async def running(
    path: Path, timing: Timing = FAST, commands: FakeCommands | None = None
) -> AsyncIterator[Running]:
    fleet = Running(load_fleet(path), timing, commands or FakeCommands())
    with fleet.supervisor.open():
        fleet.task = task = asyncio.create_task(fleet.supervisor.run())
        try:
            await fleet.until(lambda: task.done() or fleet.state.records.exists())
            records = read_records(fleet.state.records)
            fleet.instance = records.instance if records else ""
            yield fleet
        finally:
            fleet.supervisor.request_stop()
            fleet.code = await task
    assert marked(fleet.instance) == []
    assert not fleet.state.records.exists()
    assert not list(fleet.state.sockets.glob("*.sock"))


async def test_comes_up_and_publishes_routes(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok", "slow")) as fleet:
        for slot in ("gateway", "ok-0", "slow-0"):
            await fleet.until_state(slot, "ready")
        routes = read_routes(fleet.state.routes)
        assert set(routes.models) == {"ok", "slow"}
        (target,) = routes.models["ok"].targets
        assert (target.slot, target.generation, target.state) == ("ok-0", 1, "ready")
        assert target.address == f"unix:{fleet.state.sockets}/ok-0.1.sock"
        phases = [status.phase for status in fleet.history if status.slot == "slow-0"]
        assert phases[0] == ""
        assert "loading weights" in phases
        assert stat.S_IMODE(fleet.state.admin_socket.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(fleet.state.admin_socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://s", timeout=PATIENCE) as client:
            body = (await client.get("/status")).json()
            assert [unit["state"] for unit in body["units"]] == ["ready"] * 3
            assert body["supervisor"] == os.getpid()
            epoch = body["epoch"]
    assert fleet.code == 0
    after = read_routes(fleet.state.routes)
    assert after.epoch > epoch
    assert {t.state for routes in after.models.values() for t in routes.targets} == {"down"}
    async with running(fleet_file(tmp_path, "ok")) as again:
        await again.until_state("ok-0", "ready")
        assert read_routes(again.state.routes).epoch > after.epoch


async def test_a_killed_worker_is_taken_off_at_once_and_comes_back(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok", "slow")) as fleet:
        for slot in ("gateway", "ok-0", "slow-0"):
            await fleet.until_state(slot, "ready")
        mark = f"{fleet.instance}/ok-0.1"
        assert len(marked(mark)) == 2  # the worker, and its engine in a session of its own
        before = len(fleet.history)
        os.kill(fleet.unit("ok-0").pid or 0, signal.SIGKILL)
        await fleet.until(lambda: fleet.target("ok")[0] == "down")
        assert marked(mark) == []
        await fleet.until_state("ok-0", "ready", generation=2)
        assert fleet.target("ok") == ("ready", 2)
        assert fleet.unit("ok-0").restarts == 1
        assert {status.slot for status in fleet.history[before:]} == {"ok-0"}
        crash = next(status for status in fleet.history[before:] if status.state == "backoff")
        assert "SIGKILL" in (crash.error or "")


async def test_routes_that_cannot_be_written_do_not_end_the_fleet(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        fleet.state.routes.unlink()
        fleet.state.routes.mkdir()  # as good as a full disk
        os.kill(fleet.unit("ok-0").pid or 0, signal.SIGKILL)
        await fleet.until_state("ok-0", "ready", generation=2)
        fleet.state.routes.rmdir()
        await fleet.until(fleet.state.routes.exists)
        assert fleet.target("ok") == ("ready", 2)


async def test_five_crashes_and_it_stays_down(tmp_path: Path) -> None:
    timing = dataclasses.replace(FAST, policy=lambda: RestartPolicy(first=0.01))
    async with running(fleet_file(tmp_path, "crash", "ok"), timing) as fleet:
        await fleet.until_state("crash-0", "failed", generation=5)
        await fleet.until_state("ok-0", "ready")
        assert fleet.target("crash") == ("down", 5)
        assert fleet.unit("crash-0").error == fleet.unit("crash-0").last_exit == "exited with code 1"
        await asyncio.sleep(0.3)
        assert fleet.unit("crash-0").generation == 5
    assert fleet.code == 0


async def test_the_last_exit_stays_known_in_the_workers_own_words(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "engine-dies")) as fleet:
        second = ("engine-dies-0", 2, "ready")
        await fleet.until(lambda: second in {(u.slot, u.generation, u.state) for u in fleet.history})
        unit = next(u for u in fleet.history if (u.slot, u.generation, u.state) == second)
        assert (unit.error, unit.restarts) == (None, 1)
        assert unit.last_exit == "exited with code 1: the engine has ended: signal 9"
        status = ["status", "--state-dir", str(fleet.state.root)]
        shown = await asyncio.to_thread(CliRunner().invoke, pagefleet, status)
        assert "the engine has ended: signal 9" in shown.output


async def test_a_bad_configuration_fails_at_once_with_its_last_words(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "bad-configuration", "ok")) as fleet:
        await fleet.until_state("bad-configuration-0", "failed")
        await fleet.until_state("ok-0", "ready")
        unit = fleet.unit("bad-configuration-0")
        assert unit.log_tail[-1] == "--max-model-len: must be at most 2048"
        assert unit.error == "refused its configuration (exit code 2): the engine did not start: too long"
        assert unit.restarts == 0


async def test_a_start_may_be_long_but_not_stand_still(tmp_path: Path) -> None:
    timing = dataclasses.replace(FAST, start_stall=3.0)
    async with running(fleet_file(tmp_path, "slow4", "stall"), timing) as fleet:
        await fleet.until_state("slow4-0", "ready")  # takes 4 s, always moving
        await fleet.until(lambda: fleet.unit("stall-0").error is not None)
        assert fleet.unit("stall-0").error == "no progress for 3 s in phase 'loading weights'"
        assert fleet.unit("slow4-0").restarts == 0
        assert marked(f"{fleet.instance}/stall-0.1") == []


async def test_a_worker_without_progress_is_replaced(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "sick"), dataclasses.replace(FAST, unhealthy=1.0)) as fleet:
        await fleet.until_state("sick-0", "ready", generation=2)
        errors = [status.error for status in fleet.history if status.state == "backoff"]
        assert "made no progress" in (errors[0] or "")


async def test_a_busy_worker_that_answers_late_is_left_alone(tmp_path: Path) -> None:
    """Probes that take most of the limit again and again don't add up."""
    async with running(fleet_file(tmp_path, "busy"), dataclasses.replace(FAST, unhealthy=1.0)) as fleet:
        await fleet.until_state("busy-0", "ready")
        await asyncio.sleep(2.5)
        assert (fleet.unit("busy-0").state, fleet.unit("busy-0").generation) == ("ready", 1)


async def test_somebody_else_on_the_socket_is_not_taken_for_the_worker(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "impostor")) as fleet:
        await fleet.until(lambda: fleet.unit("impostor-0").error is not None)
        assert fleet.unit("impostor-0").error == "impostor-0.99 answers on the socket of impostor-0.1"
        assert "ready" not in {status.state for status in fleet.history if status.slot == "impostor-0"}


async def test_a_drain_by_hand_takes_the_worker_off_until_it_ends(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        drain = fleet.state.sockets / "ok-0.1.sock.draining"
        drain.touch()
        await fleet.until(lambda: fleet.target("ok") == ("draining", 1))
        assert fleet.unit("ok-0").state == "draining"
        drain.unlink()
        await fleet.until(lambda: fleet.target("ok") == ("ready", 1))
        drain.touch()
        await fleet.until_state("ok-0", "draining")
        os.kill(fleet.unit("ok-0").pid or 0, signal.SIGKILL)
        await fleet.until_state("ok-0", "ready", generation=2)
        (target,) = read_routes(fleet.state.routes).models["ok"].targets
        assert (target.state, target.restarts) == ("ready", 1)


async def test_why_a_worker_could_not_start_is_said_in_its_own_words(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "hopeless", "ok")) as fleet:
        await fleet.until(lambda: fleet.unit("hopeless-0").error is not None)
        assert fleet.unit("hopeless-0").error == "did not start: the KV cache is too small"
        assert "failed" not in {s.phase for s in fleet.history if s.slot == "hopeless-0"}


async def test_settings_in_our_environment_do_not_reach_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would win over what the fleet file says by leaving an option at its default."""
    monkeypatch.setenv("PAGEFLEET_WORKER_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("PAGEFLEET_GATEWAY__TIMEOUTS__IDLE", "9s")
    monkeypatch.setenv("HF_HOME", "/models")
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        for slot in ("gateway", "ok-0"):
            await fleet.until_state(slot, "ready")
            environment = psutil.Process(fleet.unit(slot).pid).environ()
            ours = {name: environment[name] for name in environment if name.startswith("PAGEFLEET_")}
            assert ours == {"PAGEFLEET_INSTANCE": f"{fleet.instance}/{slot}.1"}
            assert environment["HF_HOME"] == "/models"


async def test_one_start_per_gpu_at_a_time(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "slow", "ok", worker="{device: cuda, gpus: [0]}")
    async with running(path) as fleet:
        await fleet.until_state("slow-0", "ready")
        await fleet.until_state("ok-0", "ready")
        starting: set[str] = set()
        for status in fleet.history:
            if status.role == "worker" and status.state == "starting":
                starting.add(status.slot)
            else:
                starting.discard(status.slot)
            assert len(starting) <= 1


async def test_what_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    timing = dataclasses.replace(FAST, drain=0.5)
    async with running(fleet_file(tmp_path, "stubborn"), timing) as fleet:
        await fleet.until_state("stubborn-0", "ready")
    assert fleet.code == 0


async def test_a_second_request_to_stop_does_not_wait(tmp_path: Path) -> None:
    timing = dataclasses.replace(FAST, drain=300.0)
    async with running(fleet_file(tmp_path, "stubborn"), timing) as fleet:
        await fleet.until_state("stubborn-0", "ready")
        fleet.supervisor.request_stop()
        await fleet.until_state("stubborn-0", "stopping")
    assert fleet.code == 0


async def test_stop_while_starting(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "stall")) as fleet:
        await fleet.until_state("stall-0", "starting")
    assert fleet.code == 0


@pytest.mark.parametrize(
    ("models", "gateway"), [(["bad-configuration"], "ok"), (["ok"], "bad-configuration")]
)
async def test_a_fleet_that_can_serve_nothing_ends(tmp_path: Path, models: list[str], gateway: str) -> None:
    path = fleet_file(tmp_path, *models)
    fleet = Running(load_fleet(path), FAST, FakeCommands(gateway))
    with fleet.supervisor.open():
        async with asyncio.timeout(PATIENCE):
            assert await fleet.supervisor.run() == 1


async def test_a_second_fleet_in_the_same_directory_is_a_conflict(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        other = Supervisor(load_fleet(fleet_file(tmp_path, "ok")))
        with pytest.raises(Conflict, match=f"process {os.getpid()}"), other.open():
            pass
        await fleet.until_state("ok-0", "ready")


def test_a_port_in_use_names_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fleet_file(tmp_path, "ok")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        monkeypatch.setenv("PAGEFLEET_GATEWAY__PORT", str(port))
        supervisor = Supervisor(load_fleet(path))
        with pytest.raises(InvalidFleet, match=f"port {port} .* in use by process {os.getpid()}"):
            with supervisor.open():
                pass
        detached = [*FAKE_FLEET, "up", str(path), "--detach"]
        done = subprocess.run(detached, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert (done.returncode, f"port {port}" in done.stderr) == (2, True)
        assert not (tmp_path / "state").exists()
    with supervisor.open():  # the failure has released everything
        assert supervisor.url == f"http://127.0.0.1:{port}"


async def test_a_port_of_another_fleet_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        monkeypatch.setenv("PAGEFLEET_GATEWAY__PORT", fleet.supervisor.url.rpartition(":")[2])
        other = Supervisor(load_fleet(fleet_file(tmp_path, "ok", state_dir=tmp_path / "other")))
        with pytest.raises(InvalidFleet, match=f"of the fleet in {fleet.state.root} "), other.open():
            pass
        assert not (tmp_path / "other").exists()


def test_an_unusable_state_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    supervisor = Supervisor(load_fleet(fleet_file(tmp_path, "ok", state_dir=tmp_path / "file" / "state")))
    with pytest.raises(InvalidFleet, match=r"file/state can't be used: Not a directory"), supervisor.open():
        pass
    state = tmp_path / "half"
    (state / "run").mkdir(parents=True)
    (state / "logs").touch()
    said = CliRunner().invoke(pagefleet, ["down", "--state-dir", str(state)])
    assert (said.exit_code, f"can't be used: File exists: {state / 'logs'}" in said.stderr) == (2, True)


async def test_a_state_directory_that_somebody_removed_comes_back(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        for slot in ("ok-0", "gateway"):
            await fleet.until_state(slot, "ready")
        shutil.rmtree(fleet.state.root)
        os.kill(fleet.unit("gateway").pid or 0, signal.SIGKILL)
        for slot in ("ok-0", "gateway"):  # nobody can connect to the worker any more, however well it is
            await fleet.until(lambda s=slot: fleet.unit(s).state == "ready" and fleet.unit(s).generation > 1)
        assert fleet.unit("ok-0").restarts == 0
        await fleet.until(lambda: fleet.state.routes.exists() and fleet.target("ok") == ("ready", 2))
        assert stat.S_IMODE(fleet.state.run.stat().st_mode) == 0o700
        status = await asyncio.to_thread(ask_supervisor, fleet.state, "GET", "/status")
        assert status is not None
        with pytest.raises(Conflict):
            StateDir(fleet.state.root).acquire()


async def test_a_state_directory_that_is_another_supervisors_by_now_is_left_to_it(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        fleet.state.root.rename(tmp_path / "moved")
        other = StateDir(fleet.state.root)
        other.acquire()
        socket = other.run / "theirs.sock"
        socket.touch()
        async with asyncio.timeout(PATIENCE):
            assert await fleet.task == 0
        socket.unlink()  # it was left alone
        other.release()


async def test_a_path_too_long_for_sockets_has_them_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("longer" * 15)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # no way out either
    path = fleet_file(tmp_path, "ok", state_dir=tmp_path / ("long" * 25))
    async with running(path) as fleet:
        await fleet.until_state("ok-0", "ready")
        sockets = fleet.state.sockets
        assert sockets != fleet.state.run
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert (sockets / "ok-0.1.sock").is_socket()
        assert fleet.state.admin_socket.is_socket()
        shutil.rmtree(sockets)  # who tidies up /tmp
        await fleet.until(lambda: fleet.unit("ok-0").generation == 2 and fleet.unit("ok-0").state == "ready")
        assert (fleet.state.sockets / "ok-0.2.sock").is_socket()
        await fleet.until(fleet.state.admin_socket.is_socket)
        sockets = fleet.state.sockets
    assert not sockets.exists()


def start(path: Path) -> tuple[subprocess.Popen[str], str]:
    """A supervisor in a process of its own, once it is up; and its instance."""
    process = subprocess.Popen([*FAKE_FLEET, "up", str(path), "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "up":
            break
    records = read_records(StateDir(path.parent / "state").records)
    assert records is not None
    return process, records.instance


def test_a_detached_fleet_is_as_private_and_its_log_is_true(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "ok")
    state = StateDir(tmp_path / "state")
    before = os.umask(0o022)
    try:
        up = [*FAKE_FLEET, "up", str(path), "--detach"]
        done = subprocess.run(up, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        os.umask(before)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        for directory in (state.root, state.run, state.logs):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        text = state.log("supervisor").read_text()
        assert "pagefleet chat ok --state-dir" in text
        assert f"`pagefleet down --state-dir {state.root}` stops it." in text
        assert f"`pagefleet down --state-dir {state.root}` stops it." in done.stdout
        assert "Ctrl-C" not in text + done.stdout
        assert "__main__" not in text + done.stdout
        os.truncate(state.log("supervisor"), logs.ROTATE_AT + 1)
        deadline = time.monotonic() + PATIENCE
        while state.log("supervisor").stat().st_size > logs.ROTATE_AT:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (state.logs / "supervisor.log.1").stat().st_size == logs.ROTATE_AT + 1
    finally:
        down = [sys.executable, "-m", "gateway.cli", "down", "--state-dir", str(state.root)]
        assert subprocess.run(down, timeout=PATIENCE, check=False).returncode == 0


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "ok", "stubborn")
    process, instance = start(path)
    assert len(marked(instance)) == 5
    process.kill()
    process.communicate()
    deadline = time.monotonic() + PATIENCE
    while marked(instance):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process, _ = start(path)  # what it left in files doesn't disturb
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_a_terminated_supervisor_leaves_nothing_and_ends_well(tmp_path: Path) -> None:
    process, instance = start(fleet_file(tmp_path, "ok"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert marked(instance) == []


# --- several gateway processes


class RealGateways(FakeCommands):
    """Real gateways in front of fake workers."""

    def __init__(self, fleet: FleetFile) -> None:
        super().__init__()
        self._real = Commands(os.getpid(), fleet)

    def gateway(self, slot: str, generation: int, config: Path, state_dir: Path, fd: int) -> list[str]:
        return self._real.gateway(slot, generation, config, state_dir, fd)


async def test_gateway_processes_are_each_supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_GATEWAY__PROCESSES", "3")
    path = fleet_file(tmp_path, "ok")
    slots = ("gateway0", "gateway1", "gateway2")
    async with running(path, FAST, RealGateways(load_fleet(path))) as fleet:
        for slot in (*slots, "ok-0"):
            await fleet.until_state(slot, "ready")
        async with httpx.AsyncClient(
            base_url=fleet.supervisor.url, timeout=PATIENCE, trust_env=False
        ) as client:

            async def ask() -> int:
                close = {"connection": "close"}
                return (await client.post("/v1/completions", json={"model": "ok"}, headers=close)).status_code

            await fleet.until(lambda: fleet.target("ok")[0] == "ready")

            async def counted(number: int) -> None:
                """A request is counted right after its answer, and a kill may come between."""
                name = 'pagefleet_gateway_requests_total{model="ok",status="200",target="ok-0.1"}'
                async with asyncio.timeout(PATIENCE):
                    while f"{name} {number}.0\n" not in (await client.get("/metrics")).text:
                        await asyncio.sleep(0.05)

            assert [await ask() for _ in range(6)] == [200] * 6
            await counted(6)
            os.kill(fleet.unit("gateway1").pid or 0, signal.SIGKILL)
            assert [await ask() for _ in range(30)] == [200] * 30
            await fleet.until_state("gateway1", "ready", generation=2)
            assert fleet.unit("gateway1").restarts == 1
            assert {fleet.unit(slot).generation for slot in ("gateway0", "gateway2")} == {1}
            await counted(36)
            assert "pagefleet_gateway_processes 3.0" in (await client.get("/metrics")).text
        log = await asyncio.to_thread(
            CliRunner().invoke, pagefleet, ["logs", "gateway", "--state-dir", str(fleet.state.root)]
        )
        assert all(f"{slot} | " in log.output for slot in slots)
        boards = [fleet.state.board(slot) for slot in slots]
        assert all(stat.S_IMODE(board.stat().st_mode) == 0o600 for board in boards)
    assert fleet.code == 0


async def test_a_gateway_whose_event_loop_stands_still_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFLEET_GATEWAY__PROCESSES", "2")
    path = fleet_file(tmp_path, "ok")
    timing = dataclasses.replace(FAST, unhealthy=2.0)
    async with running(path, timing, RealGateways(load_fleet(path))) as fleet:
        for slot in ("gateway0", "gateway1"):
            await fleet.until_state(slot, "ready")
        os.kill(fleet.unit("gateway0").pid or 0, signal.SIGSTOP)
        await fleet.until_state("gateway0", "ready", generation=2)
        assert "made no progress" in (fleet.unit("gateway0").last_exit or "")
        assert fleet.unit("gateway1").generation == 1


async def test_who_is_asked_to_end_and_does_has_not_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a person restarts a process by hand, it never counts as failed."""
    monkeypatch.setattr("gateway.fleet.unit.ORDERLY_PAUSE", 0.1)
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        for generation in range(1, 7):
            await fleet.until_state("gateway", "ready", generation)
            os.kill(fleet.unit("gateway").pid or 0, signal.SIGTERM)
        await fleet.until_state("gateway", "ready", generation=7)
        assert fleet.unit("gateway").restarts == 0
        assert fleet.unit("gateway").last_exit == "was asked to end (SIGTERM) and did"
