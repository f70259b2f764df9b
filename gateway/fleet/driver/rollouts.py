"""All rollouts of a fleet: at most one at a time for a model, each with a driver of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from gateway.config import FleetFile, ModelEntry
from gateway.fleet.commands import Slot, Variant, other, slots_for, slugs_of
from gateway.fleet.driver.asked import (
    Plan,
    StartRequest,
    SwapError,
    changes_between,
    expected_seconds,
    new_version,
)
from gateway.fleet.driver.driver import Driver
from gateway.fleet.driver.hands import Hands, Site, Team
from gateway.fleet.driver.redis_watch import watch
from gateway.fleet.driver.survival import primary_runs, standby_runs, standby_was_there
from gateway.fleet.errors import EXIT_DEGRADED, EXIT_INVALID, FleetError
from gateway.fleet.judge import Verdict
from gateway.fleet.ledger import Ledger, make_ledger, this_machine
from gateway.fleet.publisher import Split
from gateway.fleet.rollout import Record, Refusal, Rollout, Version, command, record_of
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import Side
from gateway.fleet.state import FULL_WEIGHT
from gateway.fleet.unit import UnitStatus
from gateway.fleet.versions import Running, Versions, can_run, entry_of, file_version

log = logging.getLogger(__name__)


@dataclass
class _Model:
    """`entry`: the fleet file's; `version` and `variant`: what runs; `last`: its latest rollout, `driver`: of
    one that isn't over; `standby_lives`: its standby has outlived an earlier supervisor."""

    entry: ModelEntry
    slug: str
    version: Version
    variant: Variant
    last: Rollout | None = None
    driver: Driver | None = None
    standby_lives: bool = False

    def slots(self, version: Version, variant: Variant) -> list[Slot]:
        return slots_for(entry_of(self.entry, version), self.slug, variant)

    @property
    def rollout(self) -> Rollout | None:
        return self.driver.rollout if self.driver is not None else self.last


class Rollouts:
    """What the supervisor, its admin endpoint and `config apply` use of rollouts.

    `bring_up` starts a model's workers as its file, or the rollout that was under way, wants them. `run`
    drives what is under way, and what `start` and `undo` begin, until it is cancelled.
    """

    def __init__(self, fleet: FleetFile, site: Site, versions: Versions) -> None:
        self._fleet = fleet
        self._site = site
        self._versions = versions
        self._models: dict[str, _Model] = {}
        self._unfinished = {rollout.model: rollout for rollout in site.records.rollouts()}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()
        self._reserved: set[str] = set()
        self._began: dict[str, float] = {}  # slot -> when its process was started
        self._took: dict[str, float] = {}  # model -> seconds of its last start
        self._redis_down = False
        self._is_running = False
        self._room = asyncio.Lock()  # what one rollout is promised, the next one must see as taken
        site.workers.watchers.append(self._unit_changed)

    # --- models

    def bring_up(self, entry: ModelEntry, slug: str | None = None) -> None:
        """Starts the model's workers; one with a rollout that isn't over goes on with that in `run`."""
        model = self._models[entry.name] = self._restored(entry, slug or slugs_of([entry])[entry.name])
        rollout = model.last
        publisher = self._site.workers.publisher
        if rollout is None or rollout.terminal:
            slots = model.slots(model.version, model.variant)
            for slot in slots:
                publisher.place(slot)
            publisher.split(entry.name, Split(weights={model.variant: FULL_WEIGHT}))
            for slot in slots:
                self._site.workers.add(slot)
            return
        sides: dict[Side, Sequence[Slot]] = {
            "primary": model.slots(rollout.old, model.variant),
            "standby": model.slots(rollout.new, other(model.variant)),
        }
        for slot in (*sides["primary"], *sides["standby"]):
            publisher.place(slot)
        split = Split(
            weights={model.variant: rollout.primary_bp, other(model.variant): rollout.standby_bp},
            hold=rollout.hold,
            rollout_id=rollout.id,
            salt=rollout.id,
        )
        publisher.split(entry.name, split)
        workers = self._site.workers
        model.standby_lives = all(workers.outlived(slot.name) for slot in sides["standby"])
        runs_of: dict[Side, bool] = {"primary": primary_runs(rollout), "standby": standby_runs(rollout)}
        for side, runs in runs_of.items():
            for slot in sides[side]:
                if runs or workers.outlived(slot.name):
                    workers.add(slot, repaired=runs)
        if self._is_running:
            self._resume(model, rollout)

    def _restored(self, entry: ModelEntry, slug: str) -> _Model:
        """A model as it is known on disk."""
        rollout = self._unfinished.pop(entry.name, None)
        if rollout is not None and not can_run(entry, rollout.old, rollout.new):
            rollout = None
        running = self._versions.of(entry)
        last = self._versions.last(entry.name)
        if rollout is not None and not rollout.terminal:
            variant: Variant = last.variant if last is not None else ""
            return _Model(entry, slug, rollout.old, variant, rollout)
        if rollout is not None:
            self._complete_record(entry, rollout, last)
            running = self._versions.of(entry)
        if running is None:
            return _Model(entry, slug, file_version(entry), "", rollout)
        return _Model(entry, slug, running.version, running.variant, rollout)

    def _complete_record(self, entry: ModelEntry, rollout: Rollout, last: Running | None) -> None:
        """What a crash after the last transition has left undone."""
        records = self._site.records
        try:
            if any(record.id == rollout.id for record in records.history(rollout.model)):
                return
            if rollout.phase == "completed":
                variant: Variant = other(last.variant if last is not None else "")
                self._record(entry, rollout, variant)
            records.append(record_of(rollout))
        except OSError as error:
            log.error("rollout %s can't be recorded: %s", rollout.id, error)

    def runs(self, name: str) -> ModelEntry:
        """The file's entry with the source and options that the model runs."""
        model = self._models[name]
        return entry_of(model.entry, model.version)

    def variant(self, name: str) -> Variant:
        """That in which the model runs; a rollout's standby is in the other one."""
        return self._models[name].variant

    def reserve(self, names: Iterable[str]) -> None:
        """Nobody begins a rollout of these models, which `config apply` changes, until they are released.
        SwapError when somebody is about to."""
        names = set(names)
        for name in sorted(names & self._starting):
            raise SwapError(f"a rollout of {name} is about to start")
        self._reserved |= names

    def release(self, *names: str) -> None:
        self._reserved.difference_update(names)

    def configure(self, entry: ModelEntry) -> None:
        """The fleet file says something else of the model; what runs isn't touched, and goes on to count as
        what the file leaves alone. OSError when that can't be written, and isn't so."""
        model = self._models[entry.name]
        runs = self.runs(entry.name)
        is_file = (runs.source, runs.worker) == (entry.source, entry.worker)
        version = file_version(entry) if is_file else model.version
        last = self._versions.last(entry.name)
        if last is not None:
            running = msgspec.structs.replace(
                last, version=version, variant=model.variant, file=file_version(entry)
            )
            self._versions.record(entry, running)
        model.entry, model.version = entry, version

    def forget(self, name: str) -> None:
        """The model is gone, and its workers are. OSError when that can't be written."""
        self._versions.forget(name)
        self._models.pop(name, None)

    def changed_versions(self) -> dict[str, Version]:
        """Models that run something else than the fleet file says, and what."""
        return {
            name: model.version
            for name, model in self._models.items()
            if model.version != file_version(model.entry)
        }

    # --- driving

    async def run(self) -> None:
        """Until it is cancelled; what is under way is then on disk, for the next supervisor."""
        for model in self._models.values():
            if model.last is not None and not model.last.terminal:
                self._resume(model, model.last)
        self._is_running = True
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._fleet.gateway.redis_url is not None:
                    await stack.enter_async_context(watch(self._fleet.gateway.redis_url, self._redis))
                await asyncio.Event().wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _resume(self, model: _Model, rollout: Rollout) -> None:
        lives = model.standby_lives or not standby_was_there(rollout)
        driver = self._drive(model, rollout)
        driver.resume(standby_lives=lives)
        if self._fleet.gateway.redis_url is None:  # it may have had one, which was down
            driver.report(e.RedisBack(rollout_id=rollout.id))

    def _drive(self, model: _Model, rollout: Rollout) -> Driver:
        sides: dict[Side, Sequence[Slot]] = {
            "primary": model.slots(rollout.old, model.variant),
            "standby": model.slots(rollout.new, other(model.variant)),
        }
        driver = Driver(
            rollout,
            lambda made: Hands(self._site, Team(sides), made.report, lambda: _last_verdict(made.rollout)),
            self._site.records,
            lambda ended: self._finish(model, ended),
            self._site.observer.living,
        )
        model.driver = driver
        name = rollout.model
        self._tasks[name] = asyncio.create_task(driver.run(), name=f"driver of {name}")
        self._tasks[name].add_done_callback(_log_failure)
        if self._redis_down:
            driver.report(e.RedisLost(rollout_id=rollout.id))
        return driver

    def _finish(self, model: _Model, rollout: Rollout) -> None:
        """The version that won is the model's, under supervision, and on record. OSError: to be repeated."""
        completed = rollout.phase == "completed"
        variant = other(model.variant) if completed else model.variant
        if completed:
            self._record(model.entry, rollout, variant)
        self._site.records.append(record_of(rollout))
        model.version, model.variant = (rollout.new if completed else rollout.old), variant
        model.last, model.driver = rollout, None
        for slot in model.slots(model.version, variant):
            self._site.workers.add(slot)
        self._site.workers.publisher.split(model.entry.name, Split(weights={variant: FULL_WEIGHT}))

    def _record(self, entry: ModelEntry, rollout: Rollout, variant: Variant) -> None:
        running = Running(
            version=rollout.new,
            variant=variant,
            rollout_id=rollout.id,
            since=rollout.ended or time.time(),
            file=file_version(entry),
        )
        self._versions.record(entry, running)

    def _unit_changed(self, status: UnitStatus) -> None:
        model = self._models.get(status.model or "")
        if model is None:
            return
        if status.state == "starting" and status.slot not in self._began:
            self._began[status.slot] = time.monotonic()
        elif status.state == "ready" and status.slot in self._began:
            self._took[model.entry.name] = time.monotonic() - self._began.pop(status.slot)
        elif status.state not in ("starting", "waiting"):
            self._began.pop(status.slot, None)
        if model.driver is not None:
            side: Side = "primary" if status.variant == model.variant else "standby"
            model.driver.unit_changed(side, status)

    def _redis(self, is_down: bool) -> None:
        self._redis_down = is_down
        for model in self._models.values():
            if model.driver is not None:
                kind = e.RedisLost if is_down else e.RedisBack
                model.driver.report(kind(rollout_id=model.driver.rollout.id))

    # --- what people ask

    def name_of(self, name: str) -> str:
        """The model behind a name or alias. SwapError when there is none."""
        for model in self._models.values():
            if name == model.entry.name or name in model.entry.aliases:
                return model.entry.name
        known = ", ".join(self._models)
        raise SwapError(f"the fleet has no model '{name}'; it has {known}", EXIT_INVALID)

    async def plan(self, name: str, asked: StartRequest) -> Plan:
        """What `start` would do. SwapError when it can't be asked for so."""
        model = self._models[self.name_of(name)]
        new = new_version(model.entry, model.version, asked)
        return await self._plan(model, model.version, new, asked)

    async def _plan(self, model: _Model, old: Version, new: Version, asked: StartRequest) -> Plan:
        standby = model.slots(new, other(model.variant))
        alone = asked.options.strategy == "recreate"
        beside = [one for one in self._models.values() if not (alone and one is model)]
        slots = {slot.name: slot for one in beside for slot in (*self._to_come(one), *self._there(one))}
        ledger = await asyncio.to_thread(self._ledger, [*slots.values(), *standby])
        names = {slot.name for slot in standby}
        workers = tuple(worker for worker in ledger.workers if worker.slot in names)
        return Plan(
            model=model.entry.name,
            old=old,
            new=new,
            changes=changes_between(old, new),
            options=asked.options,
            workers=workers,
            places=ledger.places,
            misfit=None if alone else _misfit(ledger, names),
            problem=_problem(ledger, names) or (_misfit(ledger, names) if alone else None),
            unknown=next((worker.unknown for worker in workers if worker.unknown), None),
            seconds=expected_seconds(self._took.get(model.entry.name), asked.options),
        )

    def _there(self, model: _Model) -> list[Slot]:
        return self._site.workers.slots(model.entry.name)

    def _to_come(self, model: _Model) -> list[Slot]:
        """The standby of a rollout that has begun, also when it isn't there yet."""
        if model.driver is None or model.driver.rollout.going_back:
            return []
        return model.slots(model.driver.rollout.new, other(model.variant))

    def _ledger(self, slots: Sequence[Slot]) -> Ledger:
        try:
            return make_ledger(self._fleet, this_machine(), slots)
        except FleetError as error:
            raise SwapError(str(error), error.exit_code) from None

    async def start(self, name: str, asked: StartRequest) -> Rollout:
        """Begins a rollout. SwapError when it is refused: nothing has changed then."""
        model = self._models[self.name_of(name)]
        new = new_version(model.entry, model.version, asked)
        with self._one_at_a_time(model):
            refused = command(model.rollout, _probe_of(model, new, asked), time.time())
            if isinstance(refused, Refusal):  # before the ledger is asked, which takes a while
                raise SwapError.of(refused)
            async with self._room:
                plan = await self._plan(model, model.version, new, asked)
                if plan.problem:
                    raise SwapError(plan.problem, plan.exit_code)
                start = e.Start(
                    id=_new_id(),
                    model=model.entry.name,
                    old=model.version,
                    new=new,
                    options=asked.options,
                    misfit=plan.misfit,
                )
                return self._begin(model, start)

    async def undo(self, name: str) -> Rollout:
        """Back to the version before the last rollout."""
        model = self._models[self.name_of(name)]
        with self._one_at_a_time(model):
            refused = command(model.rollout, e.Undo(id="-"), time.time())
            if isinstance(refused, Refusal):
                raise SwapError.of(refused)
            last = model.rollout
            assert last is not None
            runs, brought = self.runs(model.entry.name), entry_of(model.entry, last.new)
            if (runs.source, runs.worker) != (brought.source, brought.worker):
                raise SwapError(
                    f"nothing to undo: {model.entry.name} no longer runs what rollout {last.id} brought in, "
                    f"but {runs.source}, as the fleet file says since; `pagefleet swap start` goes elsewhere"
                )
            back = StartRequest(source=last.old.source, options=last.options)
            async with self._room:
                plan = await self._plan(model, model.version, last.old, back)
                return self._begin(model, e.Undo(id=_new_id(), misfit=plan.misfit))

    @contextlib.contextmanager
    def _one_at_a_time(self, model: _Model) -> Iterator[None]:
        """While the ledger is asked, nobody else may begin."""
        if model.entry.name in self._starting:
            raise SwapError(f"a rollout of {model.entry.name} is about to start")
        if model.entry.name in self._reserved:
            raise SwapError(f"`config apply` is changing {model.entry.name}; try again when that is over")
        self._starting.add(model.entry.name)
        try:
            yield
        finally:
            self._starting.discard(model.entry.name)

    def _begin(self, model: _Model, asked: e.Start | e.Undo) -> Rollout:
        answer = command(model.rollout, asked, time.time())
        if isinstance(answer, Refusal):
            raise SwapError.of(answer)
        rollout, actions = answer
        if self._redis_down and rollout.recreate:
            raise SwapError("Redis is down: users would wait until it is back", EXIT_DEGRADED)
        try:
            self._site.records.save(rollout)
        except OSError as error:
            raise SwapError(f"the rollout's state can't be written: {error}", 1) from None
        self._drive(model, rollout).begin(actions)
        return rollout

    def command(self, name: str, asked: e.Command) -> Rollout:
        """Pause, resume, promote or abort. SwapError when it is refused."""
        model = self._models[self.name_of(name)]
        refusal: Refusal | None
        if model.driver is not None:
            refusal = model.driver.command(asked)
        else:
            answer = command(model.rollout, asked, time.time())
            refusal = answer if isinstance(answer, Refusal) else None
        if refusal is not None:
            raise SwapError.of(refusal)
        return self.status(name)

    def status(self, name: str) -> Rollout:
        """The model's rollout that is under way, or its last one. SwapError when it never had one."""
        rollout = self._models[self.name_of(name)].rollout
        if rollout is None:
            raise SwapError("the model has no rollout; `pagefleet swap start` begins one")
        return rollout

    async def wait(self, name: str, revision: int, seconds: float) -> Rollout:
        """The same, as soon as its revision is another one, it is over, or so much time has passed."""
        driver = self._models[self.name_of(name)].driver
        if driver is not None and driver.rollout.revision == revision:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await driver.changed.wait()
        return self.status(name)

    def under_way(self, name: str) -> str | None:
        """The id of the model's rollout that isn't over; None also for a model that isn't there."""
        model = self._models.get(name)
        return model.driver.rollout.id if model is not None and model.driver is not None else None

    def all(self) -> list[Rollout]:
        """Each model's rollout that is under way, or its last one."""
        return [model.rollout for model in self._models.values() if model.rollout is not None]

    def history(self, name: str) -> list[Record]:
        return self._site.records.history(self.name_of(name))


def _last_verdict(rollout: Rollout) -> Verdict | None:
    return rollout.verdicts.get(rollout.step_name)


def _probe_of(model: _Model, new: Version, asked: StartRequest) -> e.Start:
    return e.Start(id="-", model=model.entry.name, old=model.version, new=new, options=asked.options)


def _problem(ledger: Ledger, standby: set[str]) -> str | None:
    """Why the standby can't run by itself."""
    mine = [worker for worker in ledger.workers if worker.slot in standby and worker.problem]
    return "; ".join(f"{worker.slot}: {worker.problem}" for worker in mine) or None


def _misfit(ledger: Ledger, standby: set[str]) -> str | None:
    """Why the standby doesn't fit beside what else is in the ledger, in its words."""
    full = {place.name for place in ledger.places if place.left < 0}
    places = {worker.place for worker in ledger.workers if worker.slot in standby} & full
    return "; ".join(one for one in ledger.problems if one.partition(":")[0] in places) or None


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s has ended by mistake", task.get_name(), exc_info=task.exception())
