"""Starts, watches and stops a fleet; the one writer of its routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from contracts.options import WorkerOptions
from gateway.config import FleetFile
from gateway.fleet import listen, logs
from gateway.fleet.admin import FleetStatus, admin_app, serve_admin
from gateway.fleet.backends.local import LocalBackend
from gateway.fleet.commands import Commands, Slot, gateway_slots, slots_of
from gateway.fleet.errors import EXIT_FAILED, InvalidFleet
from gateway.fleet.probes import GatewayProbe, WorkerProbe
from gateway.fleet.publisher import Publisher
from gateway.fleet.reaper import reap
from gateway.fleet.statedir import SUPERVISOR_LOG, StateDir, write_private
from gateway.fleet.unit import StartLocks, Timing, Unit, UnitSpec, UnitStatus


class Supervisor:
    """A fleet in one process tree. `open` claims what can conflict, `run` runs until told to stop."""

    def __init__(
        self,
        fleet: FleetFile,
        *,
        commands: Commands | None = None,
        timing: Timing | None = None,
        on_change: Callable[[UnitStatus], None] = lambda status: None,
    ) -> None:
        settings = fleet.supervisor
        self._fleet = fleet
        self._commands = commands or Commands(os.getpid(), fleet)
        self._timing = timing or Timing(start_stall=settings.start_timeout, drain=settings.drain_timeout)
        self._notify = on_change
        self._slots = slots_of(fleet)
        self._gateways = gateway_slots(fleet.gateway.processes)
        self._started = time.time()
        self._stop = asyncio.Event()
        self._quick = False
        self._units: list[Unit] = []
        self.state = StateDir(settings.state_dir)
        self.reaped = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Supervisor]:
        """Owns state directory and port; Conflict or InvalidFleet when somebody else has them."""
        self.state.acquire()
        try:
            self.reaped = reap(self.state.records)
            self.state.remove_sockets()
            with self._listen() as self._listener:
                self.state.place_sockets(slot.name for slot in self._slots)
                self.state.place_boards(self._gateways)
                self._write_snapshot()
                yield self
        finally:
            self.state.remove_sockets()
            self.state.release()

    def _write_snapshot(self) -> None:
        """Restarted gateways must get the fleet file as it was checked, whatever happens to it meanwhile."""
        snapshot = json.dumps(self._fleet.model_dump(), default=str, indent=1)
        write_private(self.state.config, snapshot.encode())

    def _listen(self) -> socket.socket:
        try:
            return listen.bind(self._fleet.gateway.host, self._fleet.gateway.port)
        except InvalidFleet:
            self.state.discard()
            raise

    @property
    def url(self) -> str:
        return listen.base_url(self._listener)

    @property
    def statuses(self) -> tuple[UnitStatus, ...]:
        return tuple(unit.status for unit in self._units)

    def request_stop(self, quick: bool = False) -> None:
        """Begins to stop; the second time, or with `quick`, requests in flight aren't waited for."""
        self._quick = quick or self._stop.is_set()
        self._stop.set()
        if self._quick:
            for unit in self._units:
                unit.kill()

    async def run(self) -> int:
        """Runs the fleet; exit code 0 after a stop, 1 when nothing is left that could serve."""
        self._publisher = Publisher(self.state.routes, self._slots)
        with _signals(self.request_stop), LocalBackend(uuid.uuid4().hex, self.state.records) as backend:
            self._units = self._make_units(backend)
            for unit in self._units:
                self._changed(unit.status)
            app = admin_app(self._status, self.request_stop)
            async with serve_admin(app, self.state.admin_socket):
                try:
                    return await self._supervise()
                finally:
                    await self._shut_down()

    async def _supervise(self) -> int:
        runs = [asyncio.create_task(unit.run(), name=unit.status.slot) for unit in self._units]
        stop = asyncio.create_task(self._stop.wait())
        housekeeping = asyncio.create_task(self._keep_house())
        pending = {*runs, stop, housekeeping}
        try:
            while not stop.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a unit's run ends only in failure; an exception here is ours
                if self._hopeless():
                    return EXIT_FAILED
            return 0
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _shut_down(self) -> None:
        """Gateway first, so that requests in flight end while their workers are still there."""
        self._stop.set()
        gateways = [unit for unit in self._units if unit.status.role == "gateway"]
        workers = [unit for unit in self._units if unit.status.role == "worker"]
        for group in (gateways, workers):
            patience = 0.0 if self._quick else self._timing.drain + self._timing.stop_margin
            await asyncio.gather(*(unit.stop(patience) for unit in group))

    def _hopeless(self) -> bool:
        states = {role: [s.state for s in self.statuses if s.role == role] for role in ("gateway", "worker")}
        return any(all(state == "failed" for state in group) for group in states.values())

    def _make_units(self, backend: LocalBackend) -> list[Unit]:
        locks = StartLocks()
        specs = [*map(self._gateway_spec, self._gateways), *map(self._worker_spec, self._slots)]
        return [Unit(spec, backend, locks, self._timing, self._changed) for spec in specs]

    def _gateway_spec(self, slot: str) -> UnitSpec:
        fd = self._listener.fileno()
        return UnitSpec(
            slot=slot,
            role="gateway",
            log=self.state.log(slot),
            launch=lambda generation: self._commands.gateway(
                slot, generation, self.state.config, self.state.root, fd
            ),
            probe=lambda generation: GatewayProbe(self.state.board(slot), generation),
            fds=(fd,),
        )

    def _worker_spec(self, slot: Slot) -> UnitSpec:
        return UnitSpec(
            slot=slot.name,
            role="worker",
            model=slot.entry.name,
            log=self.state.log(slot.name),
            launch=lambda generation: self._commands.worker(
                slot, generation, self._uds(slot.name, generation)
            ),
            probe=lambda generation: WorkerProbe(self._uds(slot.name, generation), slot.name, generation),
            gpus=_gpus_of(slot.entry.worker),
        )

    def _uds(self, slot: str, generation: int) -> Path:
        """A socket per generation: a connection to an old process can never reach a new one."""
        return self.state.sockets / f"{slot}.{generation}.sock"

    def _changed(self, status: UnitStatus) -> None:
        if status.role == "worker":
            self._publisher.update(status, f"unix:{self._uds(status.slot, status.generation)}")
        with contextlib.suppress(OSError):  # who watched may have gone, as in `pagefleet up | head`
            self._notify(status)

    def _status(self) -> FleetStatus:
        return FleetStatus(
            supervisor=os.getpid(),
            state_dir=str(self.state.root),
            url=self.url,
            started=self._started,
            stopping=self._stop.is_set(),
            epoch=self._publisher.epoch,
            units=self.statuses,
        )

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(self._timing.housekeeping)
            with contextlib.suppress(OSError, InvalidFleet):  # a full disk; the next round tries again
                self.state.make()
                if not self.state.config.exists():
                    self._write_snapshot()
            self._publisher.flush()
            slots = [unit.status.slot for unit in self._units]
            for log in map(self.state.log, [*slots, SUPERVISOR_LOG]):
                with contextlib.suppress(OSError):  # a full disk; the next round tries again
                    logs.rotate(log)


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _gpus_of(options: WorkerOptions) -> tuple[int, ...]:
    """The GPUs a worker will start on; none where there are none."""
    if options.device == "cpu" or (options.device == "auto" and not Path("/dev/nvidiactl").exists()):
        return ()
    return options.gpus or (0,)
