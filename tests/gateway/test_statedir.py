"""The directory that a supervisor holds."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gateway.fleet.errors import Conflict
from gateway.fleet.statedir import LOCK, StateDir


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
