"""Starts, watches and stops a fleet; the one writer of its routes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from contracts.notify import Notifier
from gateway.config import ConfigError, FleetFile, load_fleet
from gateway.fleet import logs
from gateway.fleet.admin import FleetStatus, admin_app, serve_admin
from gateway.fleet.applying import Applier
from gateway.fleet.applying_routes import applying_routes
from gateway.fleet.backends.base import Backend
from gateway.fleet.changes import Site as ApplyingSite
from gateway.fleet.commands import Commands, Slot, gateway_slots, slots_for, slots_of, slugs_of
from gateway.fleet.driver.hands import Site
from gateway.fleet.driver.records import Records
from gateway.fleet.driver.rollouts import Rollouts
from gateway.fleet.driver.routes import rollout_routes
from gateway.fleet.errors import EXIT_FAILED, Conflict, InvalidFleet
from gateway.fleet.hosting import Predecessors, hosting_of
from gateway.fleet.observer import Observer
from gateway.fleet.probes import GatewayProbe
from gateway.fleet.publisher import Publisher
from gateway.fleet.reconcile import reconcile
from gateway.fleet.statedir import SUPERVISOR_LOG, StateDir, write_private
from gateway.fleet.unit import Timing, UnitSpec, UnitStatus
from gateway.fleet.units import Units
from gateway.fleet.versions import Versions
from gateway.fleet.workers import Workers
from gateway.reload import digest

log = logging.getLogger(__name__)


class Supervisor:
    """The control plane of a fleet. `open` claims what can conflict, `run` runs until told to stop.

    Whether it takes the fleet's processes with it when it is told to end by a signal is the backend's: those
    of systemd go on, and its successor takes them over.
    """

    def __init__(
        self,
        fleet: FleetFile,
        *,
        commands: Commands | None = None,
        timing: Timing | None = None,
        on_change: Callable[[UnitStatus], None] = lambda status: None,
        notifier: Notifier | None = None,
    ) -> None:
        settings = fleet.supervisor
        self._fleet = fleet
        self.state = StateDir(settings.state_dir)
        self._hosting = hosting_of(fleet, self.state)
        self._commands = commands or Commands(self._hosting.parent, fleet)
        self._timing = timing or Timing(start_stall=settings.start_timeout, drain=settings.drain_timeout)
        self._notify = on_change
        self._notifier = notifier or Notifier()  # whoever started the supervisor
        self._slots = slots_of(fleet)
        self._gateways = gateway_slots(fleet.gateway.processes)
        self._started = time.time()
        self._stop = asyncio.Event()
        self._leave = asyncio.Event()
        self._quick = False
        self._units: Units | None = None
        self._gateways_differ = self._is_displaced = False
        self._renewals: dict[str, asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Supervisor]:
        """Owns state directory and port; Conflict or InvalidFleet when somebody else has them."""
        self.state.acquire()
        try:
            self.state.check()
            slots = [slot.name for slot in [*self._slots, *self._other_slots()]]
            with self._hosting.open(slots, self._gateways):
                self._gateways_differ = _differ(self.state.config, self._fleet)
                self._write_snapshot(self._fleet)
                yield self
        finally:
            self.state.release()

    @property
    def reaped(self) -> int:
        """How many processes of a crashed predecessor `open` has ended."""
        return self._hosting.reaped

    def _other_slots(self) -> list[Slot]:
        """Those that the models' next versions start in."""
        slugs = slugs_of(self._fleet.models)
        return [slot for entry in self._fleet.models for slot in slots_for(entry, slugs[entry.name], "b")]

    def _write_snapshot(self, fleet: FleetFile) -> int:
        """Restarted gateways must get the fleet file as it was checked, whatever happens to it meanwhile."""
        snapshot = json.dumps(fleet.model_dump(), default=str, indent=1).encode()
        write_private(self.state.config, snapshot)
        return digest(snapshot)

    @property
    def url(self) -> str:
        return self._hosting.url

    @property
    def statuses(self) -> tuple[UnitStatus, ...]:
        return self._units.statuses if self._units is not None else ()

    def request_stop(self, quick: bool = False) -> None:
        """Begins to stop; the second time, or with `quick`, requests in flight aren't waited for."""
        self._quick = quick or self._stop.is_set()
        self._stop.set()
        if self._quick and self._units is not None:
            self._units.kill()

    async def run(self) -> int:
        """Runs the fleet; exit code 0 after a stop, 1 when nothing is left that could serve."""
        observer = Observer({slot: self.state.board(slot) for slot in self._gateways})
        self._publisher = Publisher(self.state.routes, least=observer.latest_epoch())
        on_signal = self._leave.set if self._outlived else self.request_stop
        with _signals(on_signal):
            async with self._hosting.backend() as (backend, before):
                self._units = units = self._make_units(backend, before)
                self._workers = Workers(
                    units, self._publisher, self._commands, self.state, self._hosting.memory
                )
                self.rollouts = self._make_rollouts(self._workers, observer)
                slugs = slugs_of(self._fleet.models)
                self._applier = self._make_applier(units, observer, slugs)
                more = [*rollout_routes(self.rollouts), *applying_routes(self._applier)]
                app = admin_app(self._status, self.request_stop, more)
                async with serve_admin(app, self.state, self._timing.housekeeping):
                    try:
                        with self._publisher.together():
                            for name in self._gateways:
                                units.add(self._gateway_spec(name))
                            for entry in self._fleet.models:
                                self.rollouts.bring_up(entry, slugs[entry.name])
                        self._notifier.ready(self._summary())
                        return await self._supervise(units)
                    finally:
                        await self._applier.aclose()
                        await self._end(units)

    def _make_rollouts(self, workers: Workers, observer: Observer) -> Rollouts:
        site = Site(workers, observer, Records(self.state.rollouts), self._timing)
        return Rollouts(self._fleet, site, Versions(self.state.versions))

    def _make_applier(self, units: Units, observer: Observer, slugs: Mapping[str, str]) -> Applier:
        site = ApplyingSite(
            units,
            self._workers,
            observer,
            self.state,
            lambda: self._timing,
            self._gateways,
            self.rollouts,
            self._adopt,
        )
        supervisor = self._fleet.supervisor.model_copy(update={"state_dir": self.state.root})
        return Applier(site, self._fleet.model_copy(update={"supervisor": supervisor}), slugs)

    def _adopt(self, fleet: FleetFile) -> int:
        """From now on this is the fleet file. Returns the digest of what gateways read of it. OSError when it
        can't be written down, and isn't so."""
        found = self._write_snapshot(fleet)
        old, new, timing = self._fleet.supervisor, fleet.supervisor, self._timing
        if old.start_timeout != new.start_timeout:
            timing = dataclasses.replace(timing, start_stall=new.start_timeout)
        if old.drain_timeout != new.drain_timeout:  # processes that run have the old one: the longer holds
            timing = dataclasses.replace(timing, drain=max(timing.drain, new.drain_timeout))
        self._timing = timing
        if self._units is not None:
            self._units.set_timing(timing)
        self._fleet = fleet
        self._commands = self._workers.commands = self._commands.of(fleet)
        return found

    @property
    def _outlived(self) -> bool:
        return self._hosting.parent is None

    def _make_units(self, backend: Backend, before: Predecessors) -> Units:
        return Units(
            backend,
            self._timing,
            self._changed,
            found=before.found,
            generations=before.generations,
            endures=self._outlived,
        )

    async def _end(self, units: Units) -> None:
        self._notifier.stopping("ending")
        if self._outlived and not self._stop.is_set():
            await units.leave()
            return
        self._stop.set()
        await units.leave()  # none is started again: it would need the port
        await self._hosting.close_port()
        await units.shut_down(self._patience)
        await units.end_strangers(self._patience())
        self._hosting.ended()

    async def _supervise(self, units: Units) -> int:
        stop = asyncio.create_task(self._stop.wait())
        housekeeping = asyncio.create_task(self._keep_house())
        rollouts = asyncio.create_task(self.rollouts.run())
        leave = asyncio.create_task(self._leave.wait())
        found = asyncio.create_task(self._settle(units))
        tasks: tuple[asyncio.Task[Any], ...] = (stop, leave, housekeeping, found, rollouts)
        waited: set[asyncio.Future[Any]] = {stop, leave, housekeeping, rollouts, units.ended}
        try:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()  # an exception here is a mistake of ours
            return 0 if stop in done or leave in done else EXIT_FAILED
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _patience(self) -> float:
        return 0.0 if self._quick else self._timing.drain + self._timing.stop_margin

    def _gateway_spec(self, slot: str) -> UnitSpec:
        fd = self._hosting.fd
        return UnitSpec(
            slot=slot,
            role="gateway",
            log=self.state.log(slot),
            launch=lambda generation: self._commands.gateway(
                slot, generation, self.state.config, self.state.root, fd
            ),
            probe=lambda generation: GatewayProbe(self.state.board(slot), generation),
            fds=self._hosting.fds,
        )

    def _changed(self, status: UnitStatus) -> None:
        if status.role == "worker":
            self._workers.changed(status)
        self._notifier.status(self._summary())
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
            rollouts=tuple(self.rollouts.all()),
            versions=self.rollouts.models.changed_versions(),
            change=self._applier.latest,
        )

    async def _settle(self, units: Units) -> None:
        """What a predecessor ran and nobody has asked for by now ends. Its gateways are replaced, one after
        another, if they were started by a file that says what they don't follow."""
        await asyncio.sleep(self._timing.housekeeping)
        await units.end_strangers(self._patience())
        for slot in units.taken_over if self._gateways_differ else ():
            unit = units.get(slot)
            if unit is not None and unit.status.role == "gateway":
                before = unit.status.generation
                await unit.renew(self._patience())
                while unit.status.generation == before or unit.status.state not in ("ready", "failed"):
                    await asyncio.sleep(0.1)

    def _summary(self) -> str:
        ready = sum(status.state == "ready" for status in self.statuses)
        return f"{ready} of {len(self.statuses)} processes are ready"

    async def _keep_house(self) -> None:
        while True:
            self._notifier.alive()
            await asyncio.sleep(self._timing.housekeeping)
            self._mend()
            self._publisher.flush()
            slots = [status.slot for status in self.statuses]
            for log in map(self.state.log, [*slots, SUPERVISOR_LOG]):
                with contextlib.suppress(OSError):  # a full disk; the next round tries again
                    logs.rotate(log)

    def _mend(self) -> None:
        """What somebody has removed comes back, and what can't be reached for that is replaced."""
        try:
            self.state.mend()
            if not self.state.config.exists():
                self._write_snapshot(self._fleet)
        except Conflict as error:
            if self._is_displaced and not self._stop.is_set():
                log.error("%s: this one ends", error)
                self.request_stop()
            self._is_displaced = True  # who only looks, as `pagefleet down` does, is gone at the next look
            return
        except (OSError, InvalidFleet):  # a full disk; the next round tries again
            return
        self._is_displaced = False
        for status in self._workers.unreachable():
            task = self._renewals.get(status.slot)
            if task is None or task.done():
                log.error("the socket of %s is gone; it is replaced", status.slot)
                renewal = self._workers.renew(status.slot, self._patience())
                self._renewals[status.slot] = asyncio.create_task(renewal, name=f"renewal of {status.slot}")


def _differ(snapshot: Path, fleet: FleetFile) -> bool:
    """Whether gateways that were started by the file of the snapshot would be others by this one."""
    try:
        before = load_fleet(snapshot, check_sources=False)
    except ConfigError:  # none, or another version's
        return snapshot.exists()
    changes = reconcile(before, fleet).fleet
    return any(change.key.startswith("gateway.") and change.effect != "live" for change in changes)


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
