"""A fleet for soaks, under a real systemd: real supervisor and gateways, workers of bench/soak_worker.py.

`python -m bench.soak_fleet up --detached FILE` is `pagefleet up` with those workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import yaml

import gateway.fleet.driver.planning as planning
import gateway.fleet.hosting as hosting
import gateway.fleet.supervisor as supervisor
from bench.soak_load import Kill
from gateway.board import Peer
from gateway.cli import main
from gateway.cli.common import ask_supervisor
from gateway.cli.swap_client import SwapRefused, Swaps
from gateway.config import load_fleet
from gateway.fleet.admin import FleetStatus
from gateway.fleet.commands import Commands, Slot
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.errors import FleetError
from gateway.fleet.ledger import Ledger
from gateway.fleet.listen import bind
from gateway.fleet.restart import RestartPolicy
from gateway.fleet.rollout import Rollout
from gateway.fleet.statedir import StateDir
from gateway.fleet.systemd import SystemdOptions, render
from gateway.fleet.unit import Timing
from tests.gateway.numbered_load import Pair
from tests.gateway.user_manager import UserManager

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds for anything to come back; longer is a failure
SUPERVISOR = "pagefleet-supervisor.service"
LISTED = ("list-units", "--state=active,activating,deactivating", "--plain", "--no-legend", "pagefleet*@*")
WORKED = "SOAK_WORKED"  # in the supervisor's environment: where workers write what they work on


class SoakCommands(Commands):
    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        place = ["--uds", str(uds), "--slot", slot.name, "--generation", str(generation)]
        return [sys.executable, "-m", "bench.soak_worker", os.environ[WORKED], *place]


def timing(**_: object) -> Timing:
    """Quick to look, patient with what a busy machine or a pause holds up. No number of crashes ends a unit:
    here somebody kills on purpose."""
    return Timing(
        start_stall=PATIENCE,
        unhealthy=PATIENCE,
        start_poll=0.05,
        health_poll=0.5,
        drain=30.0,
        housekeeping=0.5,
        policy=lambda: RestartPolicy(first=0.2, longest=1.0, crashes=100_000),
    )


class SoakFleet:
    """What may be done to it. Calls that wait for others go to threads: the load's loop goes on."""

    def __init__(self, manager: UserManager, folder: Path, gateways: int, models: dict[str, int]) -> None:
        self.manager = manager
        self.state = StateDir(folder / "state")
        self.swaps = Swaps(self.state)
        self.worked = folder / "worked"
        self.worked.mkdir()
        self.slots = [f"gateway{number}" for number in range(gateways)]
        self._boards = {slot: Peer(self.state.board(slot)) for slot in self.slots}
        with bind("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
        self._write(folder / "fleet.yaml", models)

    def _write(self, file: Path, models: dict[str, int]) -> None:
        judge = {"min_requests": 5}
        content: dict[str, Any] = {
            "gateway": {"port": self.port, "processes": len(self.slots), "usage": False},
            "supervisor": {"backend": "systemd", "state_dir": str(self.state.root), "drain_timeout": "30s"},
            "models": [
                {"name": name, "source": "fake/one", "replicas": replicas, "judge": judge}
                for name, replicas in models.items()
            ],
        }
        file.write_text(yaml.safe_dump(content))
        units = render(load_fleet(file), SystemdOptions(file, ROOT, user_manager=True))
        for name, text in units.items():
            (self.manager.units / name).write_text(text)
        argv = f"{sys.executable} -m bench.soak_fleet up --detached {file}"
        place = f"Environment={WORKED}={self.worked}"
        self.manager.drop_in(SUPERVISOR, f"[Service]\nExecStart=\nExecStart={argv}\n{place}\n")
        self.manager.call("daemon-reload")

    async def connect(self) -> Pair:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def status(self) -> FleetStatus | None:
        return await asyncio.to_thread(ask_supervisor, self.state, "GET", "/status")

    async def until_ready(self, gone: Collection[str] = ()) -> FleetStatus:
        """All units, none of them one of `gone` ("slot.generation"), and every gateway with fresh signs of
        life. Raises TimeoutError with what isn't."""
        status: FleetStatus | None = None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            status = await self.status()
            alive = [board.read() for board in self._boards.values()]
            if status is not None and all(reading is not None and reading.alive for reading in alive):
                ready = [unit for unit in status.units if unit.state == "ready"]
                targets = {f"{unit.slot}.{unit.generation}" for unit in ready}
                if ready and len(ready) == len(status.units) and targets.isdisjoint(gone):
                    return status
            await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready after {PATIENCE:g} s: {status}")

    async def begin_swap(self, model: str, request: StartRequest) -> None:
        """Once the supervisor has begun it; one that died with the question may have, or not."""

        def begin() -> bool:
            with contextlib.suppress(SwapRefused):
                self.swaps.start(model, request)
                return True
            with contextlib.suppress(SwapRefused):
                return self.swaps.status(model).rollout.new.source == request.source
            return False

        await _until(begin)

    async def swap_ended(self, model: str) -> Rollout:
        """The last rollout that was begun, at its end, whichever supervisor brought it there."""
        found: list[Rollout] = []

        def is_over() -> bool:
            with contextlib.suppress(SwapRefused):
                status = self.swaps.status(model)
                while status.exit_code is None:
                    found[:] = [status.rollout]
                    status = self.swaps.next(model, status.rollout.revision, 10.0)
                found[:] = [status.rollout]
                return True
            return False

        try:
            await _until(is_over)
        except TimeoutError:
            raise TimeoutError(f"not over after {PATIENCE:g} s: {found}") from None
        return found[0]

    async def kill_supervisor(self) -> None:
        """Its unit starts the next one a second later."""
        await asyncio.to_thread(self.manager.call, "kill", "--signal=SIGKILL", SUPERVISOR)

    def gateway(self, slot: str) -> psutil.Process | None:
        """The process in that slot, if one lives."""
        reading = self._boards[slot].read()
        if reading is None or not reading.alive:
            return None
        try:
            return psutil.Process(reading.pid)
        except psutil.NoSuchProcess:
            return None

    async def kill_gateway(self, slot: str) -> Kill | None:
        """Stops it first, so that it takes no more connections than it is seen to have."""
        process = self.gateway(slot)
        if process is None:
            return None
        try:
            process.suspend()
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                await asyncio.sleep(0.001)
            connections = process.net_connections("tcp")
            at = time.monotonic()
            process.kill()
        except psutil.NoSuchProcess:
            return None
        ports = frozenset(one.raddr.port for one in connections if one.raddr)
        return Kill(at, ports=ports)

    async def kill_worker(self) -> Kill | None:
        """One of a model that has another that serves; None when there is none such."""
        status = await self.status()
        ready = [unit for unit in status.units if unit.state == "ready" and unit.model] if status else []
        serving = Counter(unit.model for unit in ready)
        spare = [unit for unit in ready if serving[unit.model] > 1 and unit.pid is not None]
        if not spare:
            return None
        unit = random.choice(spare)
        at = time.monotonic()
        try:
            os.kill(unit.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return Kill(at, target=f"{unit.slot}.{unit.generation}")

    @contextlib.asynccontextmanager
    async def paused(self, slot: str) -> AsyncIterator[bool]:
        """Whether there was a process to stop; it goes on at the end."""
        process = self.gateway(slot)
        with contextlib.suppress(psutil.NoSuchProcess):
            if process is not None:
                process.send_signal(signal.SIGSTOP)
        try:
            yield process is not None
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is not None:
                    process.send_signal(signal.SIGCONT)

    async def strangers(self) -> list[str]:
        """Processes of the fleet that nobody supervises: units or workers that the supervisor doesn't tell
        of. Once all units are ready; else what isn't."""
        try:
            status = await self.until_ready()
        except TimeoutError as error:
            return [str(error)]
        known = {unit.pid for unit in status.units}
        listed = await asyncio.to_thread(self.manager.call, *LISTED)
        units = {f"pagefleet-{unit.role}@{unit.slot}.service" for unit in status.units}
        return [
            *(line for line in listed.splitlines() if line.split()[0] not in units),
            *(
                f"{process.pid} {process.cmdline()}"
                for process in self._processes()
                if process.pid not in known
            ),
        ]

    def _processes(self) -> list[psutil.Process]:
        """Gateways and workers of this fleet, by their command lines."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                mine = any(str(self.state.root) in word for word in words)
                if mine and ("bench.soak_worker" in words or "gateway" in words):
                    found.append(process)
        return found


@contextlib.asynccontextmanager
async def soak_fleet(manager: UserManager, gateways: int, models: dict[str, int]) -> AsyncIterator[SoakFleet]:
    """A fleet that is ready; `models`: their replicas."""
    with tempfile.TemporaryDirectory(prefix="pf-soak-") as folder:  # short: its sockets are in there
        fleet = SoakFleet(manager, Path(folder), gateways, models)
        await asyncio.to_thread(manager.call, "start", "pagefleet.target")
        try:
            await fleet.until_ready()
            yield fleet
        finally:
            await asyncio.to_thread(manager.call, "stop", "pagefleet.target", check=False)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


def no_ledger(*_: object) -> Ledger:
    """These workers have no size: nothing that couldn't fit."""
    return Ledger(workers=(), places=(), problems=())


def no_limit(*_: object) -> Ledger:
    raise FleetError("these workers have no size")


if __name__ == "__main__":
    setattr(supervisor, "Commands", SoakCommands)  # noqa: B010
    setattr(supervisor, "Timing", timing)  # noqa: B010
    setattr(planning, "make_ledger", no_ledger)  # noqa: B010
    setattr(hosting, "make_ledger", no_limit)  # noqa: B010
    main(prog_name="pagefleet")
