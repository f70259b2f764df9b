"""All rollouts of a fleet: at most one at a time for a model, each with a driver of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Iterator

import msgspec

from gateway.config import FleetFile
from gateway.fleet.driver.asked import Plan, StartRequest, SwapError, new_version
from gateway.fleet.driver.clock import clock_now
from gateway.fleet.driver.driver import Driver
from gateway.fleet.driver.hands import UNBORN, Hands, Site, Team
from gateway.fleet.driver.models import Model, Models
from gateway.fleet.driver.planning import Planner
from gateway.fleet.driver.redis_watch import watch
from gateway.fleet.driver.survival import standby_was_there
from gateway.fleet.errors import EXIT_DEGRADED
from gateway.fleet.judge import Verdict
from gateway.fleet.rollout import Record, Refusal, Rollout, Version, command, no_rollout, record_of
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import Side
from gateway.fleet.unit import UnitStatus
from gateway.fleet.versions import Versions, can_run, entry_of
from gateway.settings import ModelEntry

log = logging.getLogger(__name__)


class Rollouts:
    """What the supervisor, its admin endpoint and `config apply` use of rollouts.

    `bring_up` starts a model's workers as its file, or the rollout that was under way, wants them. `run`
    drives what is under way, and what `start` and `undo` begin, until it is cancelled. `models`: what runs.
    """

    def __init__(self, fleet: FleetFile, site: Site, versions: Versions) -> None:
        self.models = Models(site.workers, site.records, versions)
        self._fleet = fleet
        self._site = site
        self._planner = Planner(fleet, site.workers)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()
        self._reserved: set[str] = set()
        self._redis_down = False
        self._is_running = self._has_ended = False
        self._room = asyncio.Lock()  # what one rollout is promised, the next one must see as taken
        site.workers.watchers.append(self._unit_changed)

    def bring_up(self, entry: ModelEntry, slug: str | None = None) -> None:
        """Starts the model's workers; one with a rollout that isn't over goes on with that in `run`."""
        model = self.models.bring_up(entry, slug)
        if self._is_running and model.last is not None and not model.last.terminal:
            self._resume(model, model.last)

    def reserve(self, names: Iterable[str]) -> None:
        """Nobody begins a rollout of these models, which `config apply` changes, until they are released.
        SwapError when somebody is about to."""
        names = set(names)
        for name in sorted(names & self._starting):
            raise SwapError(f"a rollout of {name} is about to start")
        self._reserved |= names

    def release(self, *names: str) -> None:
        self._reserved.difference_update(names)

    # --- driving

    async def run(self) -> None:
        """Until it is cancelled; what is under way is then on disk, for the next supervisor."""
        for model in self.models:
            if model.last is not None and not model.last.terminal:
                self._resume(model, model.last)
        self._is_running = True
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._fleet.gateway.redis_url is not None:
                    await stack.enter_async_context(watch(self._fleet.gateway.redis_url, self._redis))
                await asyncio.Event().wait()
        finally:
            self._is_running, self._has_ended = False, True
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _resume(self, model: Model, rollout: Rollout) -> None:
        lives = model.standby_lives or not standby_was_there(rollout)
        driver = self._drive(model, rollout)
        driver.resume(standby_lives=lives)
        if self._fleet.gateway.redis_url is None:  # it may have had one, which was down
            driver.report(e.RedisBack(rollout_id=rollout.id))

    def _drive(self, model: Model, rollout: Rollout) -> Driver:
        team = Team(model.sides(rollout))
        driver = Driver(
            rollout,
            lambda made: Hands(self._site, team, made.report, lambda: _last_verdict(made.rollout)),
            self._site.records,
            lambda ended: self.models.finish(model, ended),
            self._site.observer.living,
        )
        model.driver = driver
        name = rollout.model
        self._tasks[name] = asyncio.create_task(driver.run(), name=f"driver of {name}")
        self._tasks[name].add_done_callback(_log_failure)
        if self._redis_down:
            driver.report(e.RedisLost(rollout_id=rollout.id))
        return driver

    def _unit_changed(self, status: UnitStatus) -> None:
        model = self.models.get(status.model)
        if model is None:
            return
        self._planner.note(status)
        if model.driver is not None:
            side: Side = "primary" if status.variant == model.variant else "standby"
            model.driver.unit_changed(side, status)

    def _redis(self, is_down: bool) -> None:
        self._redis_down = is_down
        for model in self.models:
            if model.driver is not None:
                kind = e.RedisLost if is_down else e.RedisBack
                model.driver.report(kind(rollout_id=model.driver.rollout.id))

    # --- what people ask

    async def plan(self, name: str, asked: StartRequest) -> Plan:
        """What `start` would do. SwapError when it can't be asked for so."""
        model = self.models.named(name)
        new = new_version(model.entry, model.version, asked)
        return await self._planner.plan(self.models, model, new, asked)

    async def start(self, name: str, asked: StartRequest) -> Rollout:
        """Begins a rollout. SwapError when it is refused: nothing has changed then."""
        model = self.models.named(name)
        new = new_version(model.entry, model.version, asked)
        with self._one_at_a_time(model):
            refused = command(model.rollout, _probe_of(model, new, asked), time.time())
            if isinstance(refused, Refusal):  # before the ledger is asked, which takes a while
                raise SwapError.of(refused)
            async with self._room:
                plan = await self._possible(model, new, asked)
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
        """Back to the version before the last rollout that was completed."""
        model = self.models.named(name)
        if model.rollout is None:
            raise SwapError(no_rollout(name))
        with self._one_at_a_time(model):
            last = self._last_completed(model)
            refused = command(model.rollout, e.Undo(id="-", completed=last), time.time())
            if isinstance(refused, Refusal):
                raise SwapError.of(refused)
            assert last is not None
            if not can_run(model.entry, last.old, last.new):
                raise SwapError(
                    f"rollout {last.id} was of options that this release doesn't know; see the log"
                )
            runs, brought = self.models.runs(model.entry.name), entry_of(model.entry, last.new)
            if (runs.source, runs.worker) != (brought.source, brought.worker):
                raise SwapError(
                    f"nothing to undo: {model.entry.name} no longer runs what rollout {last.id} brought in, "
                    f"but {runs.source}, as the fleet file says since; `pagefleet swap start` goes elsewhere"
                )
            back = StartRequest(source=last.old.source, options=last.options)
            async with self._room:
                plan = await self._possible(model, last.old, back)
                return self._begin(model, e.Undo(id=_new_id(), misfit=plan.misfit, completed=last))

    async def _possible(self, model: Model, new: Version, asked: StartRequest) -> Plan:
        """The plan of a version that can run by itself; SwapError when it can't."""
        plan = await self._planner.plan(self.models, model, new, asked)
        if plan.problem:
            raise SwapError(plan.problem, plan.exit_code)
        return plan

    def _last_completed(self, model: Model) -> Record | None:
        """What came to nothing since, changed nothing."""
        rollout = model.rollout
        if rollout is not None and rollout.phase == "completed":
            return record_of(rollout)
        records = reversed(self._site.records.history(model.entry.name))
        return next((record for record in records if record.outcome == "completed"), None)

    @contextlib.contextmanager
    def _one_at_a_time(self, model: Model) -> Iterator[None]:
        """While the ledger is asked, nobody else may begin."""
        self._refuse_at_the_end()
        if model.entry.name in self._starting:
            raise SwapError(f"a rollout of {model.entry.name} is about to start")
        if model.entry.name in self._reserved:
            raise SwapError(f"`config apply` is changing {model.entry.name}; try again when that is over")
        self._starting.add(model.entry.name)
        try:
            yield
        finally:
            self._starting.discard(model.entry.name)

    def _refuse_at_the_end(self) -> None:
        if self._has_ended:
            raise SwapError("the fleet is ending; what is under way goes on when it is up again")

    def _begin(self, model: Model, asked: e.Start | e.Undo) -> Rollout:
        self._refuse_at_the_end()
        answer = command(model.rollout, asked, time.time())
        if isinstance(answer, Refusal):
            raise SwapError.of(answer)
        rollout, actions = msgspec.structs.replace(answer[0], clock=clock_now()), answer[1]
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
        self._refuse_at_the_end()
        model = self.models.named(name)
        if model.rollout is None:
            raise SwapError(no_rollout(name))
        refusal: Refusal | None
        if model.driver is not None:
            refusal = model.driver.command(asked)
        else:
            answer = command(model.rollout, asked, time.time())
            refusal = answer if isinstance(answer, Refusal) else None
        if refusal is not None:
            raise SwapError.of(refusal)
        return self.status(name)

    def latest(self, name: str) -> Rollout | None:
        """The model's rollout that is under way, or its last one; None when it never had one."""
        return self.models.named(name).rollout

    def status(self, name: str) -> Rollout:
        """The same; SwapError when it never had one."""
        rollout = self.latest(name)
        if rollout is None:
            raise SwapError(no_rollout(name))
        return rollout

    async def wait(self, name: str, revision: int, seconds: float) -> Rollout:
        """The same, as soon as its revision is another one, it is over, or so much time has passed."""
        driver = self.models.named(name).driver
        if driver is not None and driver.rollout.revision == revision:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await driver.changed.wait()
        return self.status(name)

    def starting(self, name: str) -> tuple[UnitStatus, ...]:
        """The processes of the model's rollout that aren't ready yet; none when it is over."""
        model = self.models.get(name)
        if model is None or model.driver is None:
            return ()
        slots = self._site.workers.slots(name)
        units = (self._site.workers.unit(slot.name) for slot in slots)
        return tuple(unit.status for unit in units if unit is not None and unit.status.state in UNBORN)

    def under_way(self, name: str) -> str | None:
        """The id of the model's rollout that isn't over; None also for a model that isn't there."""
        model = self.models.get(name)
        return model.driver.rollout.id if model is not None and model.driver is not None else None

    def all(self) -> list[Rollout]:
        """Each model's rollout that is under way, or its last one."""
        return [model.rollout for model in self.models if model.rollout is not None]

    def history(self, name: str) -> list[Record]:
        return self._site.records.history(self.models.named(name).entry.name)


def _last_verdict(rollout: Rollout) -> Verdict | None:
    return rollout.verdicts.get(rollout.step_name)


def _probe_of(model: Model, new: Version, asked: StartRequest) -> e.Start:
    return e.Start(id="-", model=model.entry.name, old=model.version, new=new, options=asked.options)


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s has ended by mistake", task.get_name(), exc_info=task.exception())
