"""Cases from the field for swaps: a gateway that lags behind, a standby that isn't warm yet."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest

from gateway.board import FRESH_SECONDS
from gateway.fleet.rollout import events as e
from tests.gateway.swapping import fleet_file, swapping, users

pytestmark = pytest.mark.timeout(240)

LAG = 5.0  # seconds: longer than a silent gateway counts as living


async def test_the_old_version_serves_until_a_gateway_that_lags_has_moved(tmp_path: Path) -> None:
    """Also when it is silent for so long that nobody waits for it any more: it then comes back too late to
    send anything to the old version."""
    path = fleet_file(tmp_path, gateway="processes: 3")
    async with swapping(path) as fleet, users(fleet.supervisor.url) as load:
        await fleet.until(lambda: all(unit.state == "ready" for unit in fleet.supervisor.statuses))
        (pid,) = [unit.pid for unit in fleet.supervisor.statuses if unit.slot == "gateway1"]
        await fleet.start("fake/ok", steps=(50.0, 100.0), hold=0.0)
        await fleet.until_phase("judging")
        lagging = psutil.Process(pid)
        lagging.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            fleet.rollouts.command("m", e.Promote(full=True))
            await asyncio.sleep(FRESH_SECONDS / 2)
            seen = fleet.rollouts.status("m").phase, fleet.slots()["m-0"]
            if time.monotonic() - stopped < FRESH_SECONDS * 0.8:
                assert seen == ("shifting", "ready"), "it may still be sent requests"
            await asyncio.sleep(max(0.0, stopped + LAG - time.monotonic()))
        finally:
            lagging.send_signal(signal.SIGCONT)
        rollout = await fleet.over()
        served = sum(load.served.values())
        await fleet.until(lambda: sum(load.served.values()) > served + 12)
    assert load.failures == []
    assert (rollout.phase, rollout.cut) == ("completed", 0)


async def test_a_standby_that_flaps_gets_no_user_before_it_is_proven(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "golden: [{prompt: 'What is 2+2?', expect: '4'}]")
    async with swapping(path) as fleet, users(fleet.supervisor.url) as load:
        await fleet.until(lambda: load.served)
        await fleet.start("fake/cold", steps=(100.0,))
        weights: set[tuple[bool, int]] = set()
        while not fleet.rollouts.status("m").terminal:
            found = [target.weight_bp for target in fleet.routes.targets if target.slot == "m-b-0"]
            unproven = "proven" not in {entry.phase for entry in fleet.rollouts.status("m").log}
            weights |= {(unproven, weight) for weight in found}
            await asyncio.sleep(0.02)
        rollout = await fleet.over()
        await fleet.until(lambda: "m-b-0.1" in load.served)
    assert load.failures == []  # it errs for users who come before its golden prompt
    assert rollout.phase == "completed", rollout.reason
    assert {weight for unproven, weight in weights if unproven} == {0}
    assert 10_000 in {weight for unproven, weight in weights if not unproven}
