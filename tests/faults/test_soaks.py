"""bench/swap_soak.py and bench/kill_soak.py in short, one after the other on one fleet of a real systemd."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from bench.kill_soak import ROLES, kills
from bench.soak_fleet import soak_fleet
from bench.soak_load import account, ask, loaded
from bench.swap_soak import swaps
from tests.gateway.numbered_load import Load
from tests.gateway.user_manager import UserManager, user_manager

pytestmark = pytest.mark.systemd

HELD_BY_A_WORKER = {"stream_interrupted", "worker_failed", "IncompleteReadError"}


@pytest.fixture
def manager() -> Iterator[UserManager]:
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(user_manager())
        except OSError as error:
            (pytest.fail if os.environ.get("PAGEFLEET_FORBID_SKIP") else pytest.skip)(str(error))
        yield started


async def test_only_what_a_killed_process_held_is_lost(manager: UserManager) -> None:
    async with soak_fleet(manager, 3, {"m": 2}) as fleet:
        load = Load(fleet.connect, ask, at_a_time=6, pause=0.05)
        async with loaded(load):
            swapped = await swaps(fleet, load, 3, disturb=1.0, seed=1)
            killed = await kills(fleet, load, seconds=5.0, pause=0.5, seed=1)
        found = account(load, [*swapped.kills, *killed.kills], fleet.worked)
        assert found.failures == []
        assert found.astray == []
        assert set(found.held["worker"]) <= HELD_BY_A_WORKER
        assert set(found.by_kind) == {"short", "long", "stream"}
        assert swapped.reasons == []
        assert sum(swapped.outcomes.values()) == 3
        assert killed.not_back == ""
        assert set(killed.counts) == set(ROLES)
        assert await fleet.strangers() == []
