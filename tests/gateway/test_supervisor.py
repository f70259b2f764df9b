"""The supervisor over real processes that misbehave in chosen ways."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import stat
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from gateway.fleet.reaper import marked
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.state import read_routes
from tests.gateway.fake_fleet import FAST
from tests.gateway.supervised import PATIENCE, fleet_file, running


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
    timing = dataclasses.replace(FAST, start_stall=8.0)
    async with running(fleet_file(tmp_path, "slow10", "stall"), timing) as fleet:
        await fleet.until_state("slow10-0", "ready")  # takes 10 s, always moving
        await fleet.until(lambda: fleet.unit("stall-0").error is not None)
        assert fleet.unit("stall-0").error == "no progress for 8 s in phase 'loading weights'"
        assert fleet.unit("slow10-0").restarts == 0
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
