"""A supervisor of fake processes: in the test's own process, or as one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gateway.config import FleetFile, load_fleet
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.state import read_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.supervisor import Supervisor
from gateway.fleet.unit import Timing, UnitStatus
from tests.gateway.fake_fleet import FAST, FakeCommands

FAKE_FLEET = [sys.executable, str(Path(__file__).with_name("fake_fleet.py"))]
PATIENCE = 60.0  # the machine may be busy


def fleet_file(tmp_path: Path, *models: str, state_dir: Path | None = None, worker: str = "{}") -> Path:
    path = tmp_path / "fleet.yaml"
    lines = ["gateway: {port: 0}", f"supervisor: {{state_dir: {state_dir or tmp_path / 'state'}}}", "models:"]
    lines += [f"  - {{name: {model}, source: o/n, worker: {worker}}}" for model in models]
    path.write_text("\n".join(lines))
    return path


class Running:
    """A supervisor in this process, and every status it reported."""

    def __init__(self, fleet: FleetFile, timing: Timing, commands: FakeCommands) -> None:
        self.history: list[UnitStatus] = []
        self.supervisor = Supervisor(fleet, commands=commands, timing=timing, on_change=self.history.append)
        self.state = StateDir(fleet.supervisor.state_dir)
        self.instance = ""
        self.task: asyncio.Task[int]

    def unit(self, slot: str) -> UnitStatus:
        return next(unit for unit in self.supervisor.statuses if unit.slot == slot)

    def target(self, model: str) -> tuple[str, int]:
        target = read_routes(self.state.routes).models[model].targets[0]
        return target.state, target.generation

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_state(self, slot: str, state: str, generation: int = 1) -> None:
        await self.until(lambda: (self.unit(slot).state, self.unit(slot).generation) == (state, generation))


@contextlib.asynccontextmanager
async def running(
    path: Path, timing: Timing = FAST, commands: FakeCommands | None = None
) -> AsyncIterator[Running]:
    fleet = Running(load_fleet(path), timing, commands or FakeCommands())
    with fleet.supervisor.open():
        fleet.task = task = asyncio.create_task(fleet.supervisor.run())
        try:
            await fleet.until(lambda: task.done() or fleet.state.records.exists())
            records = read_records(fleet.state.records)
            fleet.instance = records.instance if records else ""
            yield fleet
        finally:
            fleet.supervisor.request_stop()
            fleet.code = await task
    assert marked(fleet.instance) == []
    assert not fleet.state.records.exists()
    assert not list(fleet.state.sockets.glob("*.sock"))


def start(path: Path) -> tuple[subprocess.Popen[str], str]:
    """A supervisor in a process of its own, once it is up; and its instance."""
    process = subprocess.Popen([*FAKE_FLEET, "up", str(path), "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "up":
            break
    records = read_records(StateDir(path.parent / "state").records)
    assert records is not None
    return process, records.instance
