"""How fleets end: asked once or twice, while they start, by themselves, killed, and as somebody else's."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from pathlib import Path

import pytest

from gateway.config import load_fleet
from gateway.fleet.reaper import marked
from tests.gateway.fake_fleet import FAST, FakeCommands
from tests.gateway.supervised import PATIENCE, Running, fleet_file, running, start


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
