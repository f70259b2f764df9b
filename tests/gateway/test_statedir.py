"""The directory that a supervisor holds."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest

from gateway.board import Board, Peer
from gateway.fleet.errors import Conflict
from gateway.fleet.statedir import LINK, LOCK, StateDir


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
