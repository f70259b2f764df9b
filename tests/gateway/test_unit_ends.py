"""How a process's end is told: by its code, by systemd, by the process itself, by what the kernel counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet import oom
from gateway.fleet.backends.systemd import UnitProcess
from gateway.fleet.oom import OomWatch
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.unit import StartLocks, Timing, Unit, UnitSpec, _exit_end

MEMORY = "was ended for want of memory: its MemoryMax, or the machine's"


@dataclass
class Manager:
    """systemd, which has ended a unit: a control group with a limit of memory can't be had everywhere."""

    result: str
    calls: list[tuple[str, ...]] = field(default_factory=list)

    async def show(self, unit: str, *names: str) -> list[dict[str, str]]:
        told = {"ActiveState": "failed", "MainPID": "0", "Result": self.result, "ExecMainPID": "0"}
        return [{**told, "ExecMainCode": "2", "ExecMainStatus": "9"}]

    async def call(self, *arguments: str) -> str:
        self.calls.append(arguments)
        return ""


@pytest.mark.parametrize(
    ("result", "failure", "told"),
    [
        ("oom-kill", None, MEMORY),
        ("oom-kill", "the engine has ended (signal 9)", f"{MEMORY}: the engine has ended (signal 9)"),
        ("signal", None, "was killed (SIGKILL)"),
        ("signal", "no such tensor", "did not start: no such tensor"),
    ],
)
async def test_what_systemd_knows_of_an_end_is_told_before_what_the_process_said(
    result: str, failure: str | None, told: str
) -> None:
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    manager: Any = Manager(result)
    process = UnitProcess(manager, "pagefleet-worker@m-0.service", None, sleeper.pid)
    sleeper.kill()
    async with asyncio.timeout(60):
        assert await process.exited == -9
        await sleeper.wait()
    assert manager.calls == [("reset-failed", "pagefleet-worker@m-0.service")]
    assert _exit_end(process, failure).reason == told


def test_only_an_end_for_want_of_memory_that_is_recent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vmstat, now = tmp_path / "vmstat", 1000.0
    monkeypatch.setattr(oom, "VMSTAT", vmstat)
    monkeypatch.setattr("gateway.fleet.oom.time.monotonic", lambda: now)
    watch = OomWatch()
    watch.look()  # without such a file
    assert not watch.has_killed()
    for seconds, kills, is_told in ((1, 0, False), (1, 1, True), (5, 1, True), (6, 1, False), (1, 3, True)):
        now += seconds
        vmstat.write_text(f"pgfault 7\noom_kill {kills}\noom_killer_x 9\n")
        assert watch.has_killed() is is_told, (now, kills)
        watch.look()


async def test_one_that_is_no_longer_to_be_repaired_is_not_started_when_its_pause_is_over(
    tmp_path: Path,
) -> None:
    """A version that leaves, one of whose processes had crashed just before."""
    starts = 0

    class Backend:
        def spawn(self, *_: object, **__: object) -> Any:
            nonlocal starts
            starts += 1
            raise OSError("no room")

    never: Any = None
    spec = UnitSpec("m-0", "worker", tmp_path / "log", lambda generation: [], lambda generation: never)
    timing = Timing(policy=lambda: RestartPolicy(first=0.2))
    unit = Unit(spec, Backend(), StartLocks(), timing, lambda status: None)
    running = asyncio.create_task(unit.run())
    async with asyncio.timeout(60):
        while unit.status.state != "backoff":
            await asyncio.sleep(0.01)
        unit.repaired = False
        await running
    assert (unit.status.state, unit.status.retry_at, starts) == ("failed", None, 1)
    assert unit.status.error == "can't be started: no room"
