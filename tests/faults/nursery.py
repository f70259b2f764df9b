"""Supervisors in processes of their own that cost next to nothing: a process that has loaded all forks them.

`python -m tests.faults.nursery` reads a JSON object a line, `{"argv": ["up", …], "out": PATH, "env": {…}}`,
runs `pagefleet` so in a child, and prints the child's process id. Workers are fake models
(tests/faults/gated_model.py), gateways have no HTTP (tests/faults/fake_gateway.py). The children end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

import gateway.fleet.driver.driver as driver_module
import gateway.fleet.driver.planning as planning_module
import gateway.fleet.supervisor as supervisor_module
from gateway.cli import main as pagefleet
from gateway.cli.common import supervisor_client
from gateway.cli.swap_client import SwapRefused, Swaps
from gateway.config import FleetFile
from gateway.fleet.admin import FleetStatus
from gateway.fleet.commands import Slot
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.ledger import Ledger, Machine, Place, Worker
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.state import Routes, read_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.unit import UnitStatus
from tests.conftest import ROOT
from tests.gateway.swapping import PATIENCE, TIMING, FakeModels, fleet_file

_NEEDED = (  # what a supervisor loads on its way
    "gateway.cli.up", "httpcore", "h11", "anyio._backends._asyncio", "uvicorn.protocols.http.httptools_impl",
    "uvicorn.lifespan.off", "encodings.idna",
)  # fmt: skip
GATEWAY, MODEL = (str(Path(__file__).with_name(name)) for name in ("fake_gateway.py", "gated_model.py"))


class FakeFleet(FakeModels):
    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        behaviour = slot.entry.source.rpartition("/")[2]
        place = ["--uds", str(uds), "--slot", slot.name, "--generation", str(generation)]
        return [sys.executable, "-P", MODEL, behaviour, *place]

    def gateway(self, slot: str, generation: int, config: Path, state_dir: Path, fd: int) -> list[str]:
        state = StateDir(state_dir)
        place = ["--board", str(state.board(slot)), "--routes", str(state.routes), "--config", str(config)]
        return [sys.executable, "-P", GATEWAY, *place, "--generation", str(generation)]


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "tests.faults.nursery"]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def run(self, *argv: str, out: Path, **env: str) -> int:
        """The process id of a `pagefleet` with these words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"argv": argv, "out": str(out), "env": env}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


class Fleet:
    """`pagefleet up` of the model `m`, and gates: while one is there, who is behind it doesn't go on."""

    def __init__(
        self, made: Nursery, folder: Path, model: str = "", more: str = "", gateway: str = ""
    ) -> None:
        self.path = fleet_file(folder, model, more, gateway)
        self.state = StateDir(folder / "state")
        self.swaps = Swaps(self.state)
        self.gates = folder / "gates"
        self.gates.mkdir()
        self._out = folder / "out"
        self._nursery = made
        self._client = supervisor_client(self.state)
        self._client.timeout = PATIENCE
        self.pid = 0
        self.up()

    def up(self) -> None:
        """Until something serves."""
        gates = {"FAKE_GATES": str(self.gates)}
        self.pid = self._nursery.run("up", str(self.path), "--json", out=self._out, **gates)
        self.until(self._is_up)
        records = read_records(self.state.records)
        assert records is not None
        self.instance = records.instance

    def _is_up(self) -> bool:
        assert self.lives, self.said
        status = self.status()
        return status is not None and any(one.state == "ready" for one in status.units)

    @property
    def lives(self) -> bool:
        return os.path.exists(f"/proc/{self.pid}")

    def status(self) -> FleetStatus | None:
        try:
            return msgspec.json.decode(self._client.get("/status").content, type=FleetStatus)
        except (httpx.HTTPError, OSError):
            return None

    def kill(self) -> None:
        """`kill -9` of the supervisor; all that it had started is gone then."""
        os.kill(self.pid, signal.SIGKILL)
        self.until(lambda: not self.lives)
        self.until(lambda: not marked(self.instance))

    def down(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        self.until(lambda: not self.lives)
        assert marked(self.instance) == []

    @property
    def said(self) -> str:
        """What supervisors have printed."""
        return self._out.read_text()

    def units(self) -> tuple[UnitStatus, ...]:
        status = self.status()
        assert status is not None
        return status.units

    def process(self, slot: str) -> int:
        """Its process id; there must be one, since 0 would be this process's group to who kills it."""
        pid = next(unit.pid for unit in self.units() if unit.slot == slot)
        assert pid, (slot, self.units())
        return pid

    def kill_process(self, slot: str) -> None:
        """`kill -9`, until the supervisor knows: before, it would call the dead one ready."""
        self.until(lambda: any(unit.slot == slot and unit.pid for unit in self.units()))
        self.kill_if_there(slot)

    def kill_if_there(self, slot: str) -> None:
        """The same of a process that may be about to end by itself."""
        pids = {unit.pid for unit in self.units() if unit.slot == slot and unit.pid}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.until(lambda: not pids & {unit.pid for unit in self.units()})

    # --- gates

    def close_gate(self, name: str, text: str = "") -> None:
        (self.gates / name).write_text(text)

    def open_gate(self, name: str) -> None:
        (self.gates / name).unlink()

    def open_gates(self) -> None:
        for gate in self.gates.iterdir():
            gate.unlink()

    # --- rollouts

    def start(self, source: str = "fake/ok", model: str = "m", **options: Any) -> Rollout:
        asked = StartRequest(source=source, options=Options(**{"steps": (100.0,), "hold": 0.0, **options}))
        return self.swaps.start(model, asked).rollout

    def rollout(self, model: str = "m") -> Rollout:
        return self.swaps.status(model).rollout

    def until_phase(self, phase: str) -> Rollout:
        self.until(lambda: self.rollout().phase == phase or self.rollout().terminal)
        found = self.rollout()
        assert found.phase == phase, (found.phase, found.reason, [entry.what for entry in found.log])
        return found

    def over(self, model: str = "m") -> Rollout:
        self.until(lambda: self.swaps.status(model).exit_code is not None)
        return self.rollout(model)

    def workers(self) -> dict[str, str]:
        """Their states, by slot."""
        return {unit.slot: unit.state for unit in self.units() if unit.role == "worker"}

    def routes(self, model: str = "m") -> Routes:
        return read_routes(self.state.routes).models[model]

    def until(self, condition: Callable[[], Any], patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                with contextlib.suppress(SwapRefused):
                    raise AssertionError(f"{self.rollout()}, {self.status()}")
                raise AssertionError(self.said)
            time.sleep(0.04)


def _ledger(fleet: FleetFile, machine: Machine, slots: Sequence[Slot]) -> Ledger:
    """There is room for as many workers as the gate `room` says; `ledger` is the gate of the answer."""
    gates = Path(os.environ["FAKE_GATES"])
    while (gates / "ledger").exists():
        time.sleep(0.02)
    room = int((gates / "room").read_text()) if (gates / "room").exists() else 100
    names, left = [slot.name for slot in slots], room - len(slots)
    workers = [
        Worker(slot=slot.name, model=slot.entry.name, place="host", estimate=None, total=1, problem=None,
               unknown=None)
        for slot in slots
    ]  # fmt: skip
    return Ledger(
        workers=tuple(workers),
        places=(Place(name="host", total=room, taken=len(slots), left=left),),
        problems=(f"host: {', '.join(names)} are {-left} too many",) if left < 0 else (),
    )


def _serve() -> None:
    """Forks a child for each line."""
    setattr(supervisor_module, "Commands", FakeFleet)  # noqa: B010
    policy = partial(RestartPolicy, first=0.2, longest=0.2, crashes=1000)
    slower = dataclasses.replace(TIMING, start_poll=0.05, health_poll=0.5, housekeeping=0.5, policy=policy)
    setattr(supervisor_module, "Timing", lambda **_: slower)  # noqa: B010
    setattr(planning_module, "make_ledger", _ledger)  # noqa: B010
    setattr(driver_module, "TICK", 0.1)  # noqa: B010
    for needed in _NEEDED:
        importlib.import_module(needed)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(asked["argv"], asked["out"], asked["env"])
        print(pid, flush=True)


def _become(argv: list[str], out: str, env: dict[str, str]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the nursery
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(env)
    pagefleet(argv, prog_name="pagefleet")
    os._exit(0)


if __name__ == "__main__":
    _serve()
