"""`pagefleet` with fake processes: `python fake_fleet.py up FILE`. A worker behaves as its model is named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import gateway.fleet.supervisor as supervisor
from gateway.cli import main
from gateway.fleet.commands import Slot
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.statedir import StateDir
from gateway.fleet.unit import Timing

SCRIPT = str(Path(__file__).with_name("fake_process.py"))

# Quick to look, patient with processes that a busy machine holds up. Tests of limits have their own.
FAST = Timing(
    start_stall=30.0,
    unhealthy=10.0,
    start_poll=0.02,
    health_poll=0.1,
    drain=2.0,
    stop_margin=0.0,
    housekeeping=0.1,
    policy=lambda: RestartPolicy(first=0.2),
)


class FakeCommands:
    """Command lines of tests/gateway/fake_process.py in place of `worker` and `gateway`."""

    def __init__(self, gateway: str = "ok") -> None:
        self._gateway = gateway

    def of(self, fleet: object) -> FakeCommands:
        return self

    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        place = ["--uds", str(uds), "--slot", slot.name, "--generation", str(generation)]
        return [sys.executable, "-I", "-S", SCRIPT, "worker", slot.entry.name, *place]

    def gateway(self, slot: str, generation: int, config: Path, state_dir: Path, fd: int) -> list[str]:
        board = StateDir(state_dir).board(slot)
        place = ["--fd", str(fd), "--board", str(board), "--generation", str(generation)]
        return [sys.executable, "-I", "-S", SCRIPT, "gateway", self._gateway, *place]


if __name__ == "__main__":
    setattr(supervisor, "Commands", lambda *_: FakeCommands())  # noqa: B010
    setattr(supervisor, "Timing", lambda **_: FAST)  # noqa: B010
    setattr(importlib.import_module("gateway.cli.up"), "OWN_COMMAND", (sys.executable, __file__))  # noqa: B010
    main(prog_name="pagefleet")
