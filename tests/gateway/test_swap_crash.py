"""The supervisor is killed in the middle of a swap: the next one ends it well, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.cli.common import ask_supervisor
from gateway.cli.swap_client import SwapRefused, Swaps
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.statedir import StateDir
from tests.conftest import ROOT
from tests.gateway.swapping import COMMAND, PATIENCE, fleet_file

pytestmark = pytest.mark.timeout(300)


class Fleet:
    """`pagefleet up` with fake models, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = StateDir(path.parent / "state")
        self.swaps = Swaps(self.state)
        self.up()

    def up(self) -> None:
        argv = [*COMMAND, "up", str(self.path), "--json"]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "up":
                self.url = event["url"]
                break
        records = read_records(self.state.records)
        assert records is not None
        self.instance = records.instance

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        _until(lambda: not marked(self.instance))

    def start(self, source: str, **options: object) -> None:
        wanted = {"steps": (100.0,), "hold": 0.0, **options}
        self.swaps.start("m", StartRequest(source=source, options=Options(**wanted)))  # type: ignore[arg-type]

    def until_phase(self, phase: str) -> None:
        _until(lambda: self.swaps.status("m").rollout.phase == phase)

    def over(self) -> Rollout:
        _until(lambda: self.swaps.status("m").exit_code is not None)
        return self.swaps.status("m").rollout

    def slots(self) -> dict[str, str]:
        status = ask_supervisor(self.state, "GET", "/status")
        assert status is not None
        return {unit.slot: unit.state for unit in status.units if unit.role == "worker"}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(fleet_file(tmp_path))


def crash_in(fleet: Fleet, phase: str) -> Rollout:
    fleet.until_phase(phase)
    fleet.kill()
    fleet.up()
    rollout = fleet.over()
    assert any(entry.what == "the supervisor has taken it up again" for entry in rollout.log)
    return rollout


def test_a_canary(fleet: Fleet) -> None:
    """Before it is loaded it is loaded again; later its loss is a crash; past the return it is started."""
    try:
        fleet.start("fake/late-3")
        rollout = crash_in(fleet, "starting")
        assert (rollout.phase, fleet.slots()) == ("completed", {"m-alt-0": "ready"})

        fleet.start("fake/ok", hold=60.0)
        rollout = crash_in(fleet, "judging")
        assert (rollout.phase, rollout.exit_code) == ("rolled_back", 4)
        assert rollout.reason == "the standby crashed: it ended with the supervisor"
        assert fleet.slots() == {"m-alt-0": "ready"}

        (socket,) = fleet.state.sockets.glob("m-alt-0.*.sock")
        with request_on(socket):
            fleet.start("fake/ok")
            rollout = crash_in(fleet, "draining")
        assert rollout.phase == "completed"
        assert fleet.slots() == {"m-0": "ready"}
        assert [record.outcome for record in fleet.swaps.history("m")] == [
            "completed", "rolled_back", "completed",
        ]  # fmt: skip
    finally:
        fleet.kill()


@contextlib.contextmanager
def request_on(socket: Path) -> Iterator[None]:
    """A long request that came past the gateways."""
    body = {"model": "m", "stream": True, "fake": {"chunks": 100_000, "delay": 0.1}}
    transport = httpx.HTTPTransport(uds=str(socket))
    with httpx.Client(transport=transport, base_url="http://worker", timeout=PATIENCE) as client:
        with client.stream("POST", "/v1/completions", json=body):
            yield


def test_recreate(fleet: Fleet) -> None:
    try:
        fleet.start("fake/late-3", strategy="recreate")
        rollout = crash_in(fleet, "starting")
        assert (rollout.phase, fleet.slots()) == ("completed", {"m-alt-0": "ready"})

        fleet.start("fake/ok", strategy="recreate", hold=60.0)
        rollout = crash_in(fleet, "judging")
        assert (rollout.phase, fleet.slots()) == ("rolled_back", {"m-alt-0": "ready"})
    finally:
        fleet.kill()
    with pytest.raises(SwapRefused, match="no fleet is up"):
        fleet.swaps.status("m")
