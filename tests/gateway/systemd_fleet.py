"""`pagefleet` with real worker servers, whose engines have no model (tests/worker/fake_worker.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import gateway.fleet.supervisor as supervisor
from gateway.cli import main
from gateway.fleet.commands import Commands, Slot
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.unit import Timing

LOOKING = Timing(
    start_poll=0.05,
    health_poll=0.2,
    housekeeping=0.5,
    drain=15.0,
    policy=lambda: RestartPolicy(first=0.2),
)


class FakeEngines(Commands):
    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        options = super().worker(slot, generation, uds)[4:]
        return [sys.executable, "-m", "tests.worker.fake_worker", *options]


if __name__ == "__main__":
    setattr(supervisor, "Commands", FakeEngines)  # noqa: B010
    setattr(supervisor, "Timing", lambda **_: LOOKING)  # noqa: B010
    main(prog_name="pagefleet")
