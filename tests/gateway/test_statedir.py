"""The directory that a supervisor holds."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.board import Board, Peer
from gateway.cli import main as pagefleet
from gateway.fleet.driver.records import Records
from gateway.fleet.errors import Conflict, InvalidFleet
from gateway.fleet.reaper import reap
from gateway.fleet.statedir import LINK, LOCK, StateDir, read_file
from tests.gateway.swapping import fleet_file


def test_a_lock_that_was_removed_is_taken_again_also_on_a_full_disk(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.acquire()
    (state.root / LOCK).unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        state.mend()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    state.mend()
    assert state.is_ours()
    with pytest.raises(Conflict):
        StateDir(state.root).acquire()
    state.release()


def test_boards_lie_in_memory_and_come_back_when_they_are_taken_away(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.acquire()
    state.place_boards(["gateway0", "gateway1"])
    elsewhere = state.boards.readlink()
    assert elsewhere.is_relative_to("/dev/shm")
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in elsewhere.iterdir()} == {LINK, "gateway0.board", "gateway1.board"}
    kept = state.board("gateway0").stat().st_ino
    state.place_boards(["gateway0"], afresh=False)
    assert [path.stat().st_ino for path in elsewhere.glob("*.board")] == [kept]

    shutil.rmtree(elsewhere)  # as logind does when a user logs out
    state.mend()
    Board(state.board("gateway0")).beat()
    reading = Peer(state.board("gateway0")).read()
    assert reading is not None
    assert reading.alive
    elsewhere = state.boards.readlink()
    state.place_boards(["gateway0"])
    assert not elsewhere.exists()
    elsewhere = state.boards.readlink()
    state.remove_boards()
    assert not elsewhere.exists()
    assert not os.path.lexists(state.boards)
    state.release()


def test_boards_where_no_memory_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in (tmp_path / "none", Path("/proc")):
        monkeypatch.setattr("gateway.fleet.statedir.MEMORY", memory)
        state = StateDir(tmp_path / "state")
        state.acquire()
        state.place_boards(["gateway"])
        assert state.boards.is_dir()
        assert not state.boards.is_symlink()
        assert state.board("gateway").exists()
        state.remove_boards()
        assert not state.boards.exists()
        state.release()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo])
def test_what_is_in_the_place_of_the_boards_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    state = StateDir(tmp_path / "state")
    state.acquire()
    make(state.boards)
    state.place_boards(["gateway"])
    assert state.board("gateway").exists()
    state.remove_boards()
    state.release()


def test_a_link_to_what_is_not_a_fleets_takes_nothing_away(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.acquire()
    other = tmp_path / "pagefleet-other"
    other.mkdir()
    state.boards.symlink_to(other)
    state.remove_boards()
    assert other.exists()
    assert not os.path.lexists(state.boards)
    state.release()


@pytest.mark.parametrize(
    "said", [b"", b"\xff\xfe\x80", b"[" * 100_000, b"/tmp/x\0y", b"relative/pagefleet-a", b"/etc"]
)
def test_a_place_of_sockets_that_is_none_is_not_one(tmp_path: Path, said: bytes) -> None:
    state = StateDir(tmp_path / "state")
    state.acquire()
    (state.run / "sockets").write_bytes(said)
    assert state.sockets == state.run
    state.remove_sockets()
    state.place_sockets(["m-0"])
    assert state.admin_socket == state.run / "admin.sock"
    state.release()


FILES = (
    "lock", "routes.json", "versions.json", "keys.db", "rollouts/m.json", "rollouts/m.history.jsonl",
    "run/processes.json", "run/fleet.json", "run/sockets", "run/m-0.launch.json", "logs/gateway.log",
    "routes.json.tmp",
)  # fmt: skip


@pytest.mark.parametrize("what", ["directory", "pipe", "device", "loop"])
def test_what_is_in_the_place_of_a_file_is_named_at_once(tmp_path: Path, what: str) -> None:
    fleet, root = fleet_file(tmp_path), tmp_path / "state"
    StateDir(root).make()
    for name in FILES:
        path = root / name
        match what:
            case "directory":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)  # whoever opens it waits for the other end
            case "device":
                path.symlink_to("/dev/null")
            case "loop":
                path.symlink_to(path)
        shown = CliRunner().invoke(pagefleet, ["up", str(fleet)])
        assert (shown.exit_code, "can't be used: " in shown.stderr) == (2, True), shown.output
        assert str(path) in shown.stderr
        path.rmdir() if what == "directory" else path.unlink()


def test_a_pipe_is_not_waited_for_while_a_fleet_runs(tmp_path: Path) -> None:
    records = Records(tmp_path)
    os.mkfifo(tmp_path / "m.history.jsonl")
    os.mkfifo(tmp_path / "m.json")
    with pytest.raises(OSError, match="it is no file"):
        records.history("m")
    assert list(records.rollouts()) == []
    with pytest.raises(OSError, match="it is no file"):
        read_file(tmp_path)


def test_a_directory_in_the_place_of_a_socket(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.make()
    (state.run / "admin.sock").mkdir()
    with pytest.raises(InvalidFleet, match=r"admin\.sock is a directory; move it away"):
        state.check()
    state.remove_sockets()
    assert (state.run / "admin.sock").is_dir()


def test_the_lock_is_free_again_after_that(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.make()
    state.records.mkdir()
    assert reap(state.records) == 0  # as `down` does
    state.acquire()
    with pytest.raises(InvalidFleet, match="is a directory; move it away"):
        state.check()
    state.release()
    state.records.rmdir()
    (state.root / "lost+found").mkdir()  # others' own
    state.acquire()
    state.check()
    state.release()
