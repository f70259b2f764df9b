"""Gateway processes under a supervisor: each watched by itself."""

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
from gateway.config import FleetFile, load_fleet
from gateway.fleet.commands import Commands
from tests.gateway.fake_fleet import FAST, FakeCommands
from tests.gateway.supervised import PATIENCE, fleet_file, running


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
            pid = fleet.unit("gateway1").pid or 0
            os.kill(pid, signal.SIGKILL)
            await fleet.until(lambda: not psutil.pid_exists(pid))  # it may take a connection as it dies
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
