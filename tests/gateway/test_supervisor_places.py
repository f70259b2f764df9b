"""Where a fleet lives: its port and its state directory, taken, unusable, removed, with too long a path."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from gateway.cli.common import ask_supervisor
from gateway.config import load_fleet
from gateway.fleet import logs
from gateway.fleet.errors import Conflict, InvalidFleet
from gateway.fleet.statedir import StateDir
from gateway.fleet.supervisor import Supervisor
from tests.gateway.supervised import FAKE_FLEET, PATIENCE, fleet_file, running


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


@pytest.mark.parametrize("what", ["directory", "link to nothing"])
async def test_something_else_in_the_place_of_the_admin_socket(tmp_path: Path, what: str) -> None:
    """It isn't said that no fleet is up, and what to do is true."""
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        place = fleet.state.admin_socket
        state = ["--state-dir", str(fleet.state.root)]
        place.unlink()
        if what == "directory":
            place.mkdir()
            (place / "kept").touch()
            for command in (
                ["status"],
                ["swap", "start", "ok", "--set", "max_num_seqs=2"],
                ["swap", "status"],
            ):
                done = await asyncio.to_thread(CliRunner().invoke, pagefleet, [*command, *state])
                assert done.exit_code != 0, command
                assert f"{place} is no socket; move it away" in done.stderr, command
            place.rename(tmp_path / "moved")
        else:
            place.symlink_to(tmp_path / "nothing")
        await fleet.until(lambda: place.is_socket() and not place.is_symlink())
        done = await asyncio.to_thread(CliRunner().invoke, pagefleet, ["status", *state])
        assert done.exit_code == 0, done.output


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
