"""Cases from the field for fleets that change while they serve: a gateway that lags behind, a standby that
isn't warm yet, settings that concern no process."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from gateway.board import FRESH_SECONDS
from gateway.cli import main as pagefleet
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
            found = [target.weight_bp for target in fleet.routes.targets if target.slot == "m-alt-0"]
            unproven = "proven" not in {entry.phase for entry in fleet.rollouts.status("m").log}
            weights |= {(unproven, weight) for weight in found}
            await asyncio.sleep(0.02)
        rollout = await fleet.over()
        await fleet.until(lambda: "m-alt-0.1" in load.served)
    assert load.failures == []  # it errs for users who come before its golden prompt
    assert rollout.phase == "completed", rollout.reason
    assert {weight for unproven, weight in weights if unproven} == {0}
    assert 10_000 in {weight for unproven, weight in weights if not unproven}


async def test_what_changes_live_costs_no_process_and_no_request_and_all_gateways_agree(
    tmp_path: Path,
) -> None:
    """From the moment on in which `config apply` has ended; until then a gateway answers by either file."""
    path = tmp_path / "fleet.yaml"

    def write(number: int) -> None:
        gateway = f"{{port: 0, processes: 3, timeouts: {{total: {20 + number}m}}}}"
        model = f"{{name: m, aliases: [nick{number}], source: fake/ok}}"
        state = f"{{state_dir: {tmp_path / 'state'}}}"
        path.write_text(f"gateway: {gateway}\nsupervisor: {state}\nmodels: [{model}]\n")

    write(0)
    async with swapping(path) as fleet, users(fleet.supervisor.url, 3) as load:
        await fleet.until(lambda: all(unit.state == "ready" for unit in fleet.supervisor.statuses))
        before = {(unit.slot, unit.pid, unit.generation) for unit in fleet.supervisor.statuses}
        assert len(before) == 4
        for number in range(1, 4):
            write(number)
            command = ["config", "apply", str(path)]
            applied = await asyncio.to_thread(CliRunner().invoke, pagefleet, command)
            assert applied.exit_code == 0, applied.output
            assert await listed(fleet.supervisor.url) == {("m", f"nick{number}")}
        assert {(unit.slot, unit.pid, unit.generation) for unit in fleet.supervisor.statuses} == before
        served = sum(load.served.values())
        await fleet.until(lambda: sum(load.served.values()) > served + 10)
    assert load.failures == []


async def listed(url: str) -> set[tuple[str, ...]]:
    """What three processes list as models: all answers that there are, over connections of their own."""
    answers, processes, asked = set(), set(), 0
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        async with asyncio.timeout(60):
            while asked < 60 or len(processes) < 3:
                asked += 1
                answer = await client.get("/v1/models", headers={"connection": "close"})
                processes.add(answer.headers["x-request-id"].partition("-")[0])
                answers.add(tuple(sorted(card["id"] for card in answer.json()["data"])))
    return answers
