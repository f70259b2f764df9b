"""How a running fleet is brought to another fleet file: what is unchanged isn't touched, no request lost.

In this order: workers hear their new names, then gateways the new file, then gateway processes are replaced
where a setting needs it; then models come, go, are swapped, get more or fewer workers, all at the same time.
What fails is reported and undoes nothing else; only settings that a gateway can't start with are taken back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.config import FleetFile
from gateway.fleet.commands import Slot, slots_for
from gateway.fleet.driver.asked import StartRequest, SwapError
from gateway.fleet.driver.peer import Lost, Peer, Refused, peers
from gateway.fleet.driver.rollouts import Rollouts
from gateway.fleet.leaving import POLL, Leaving
from gateway.fleet.observer import Observer
from gateway.fleet.reconcile import ModelPlan
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.statedir import StateDir
from gateway.fleet.steps import Applying, Step, StepFailed
from gateway.fleet.unit import Timing, Unit, UnitStatus
from gateway.fleet.units import Units
from gateway.fleet.workers import Workers
from gateway.settings import ModelEntry

TAKEN_WITHIN = 60.0  # seconds for gateways to take a new file, and for workers to take new names


@dataclass(frozen=True)
class Site:
    """The parts of a fleet. `gateways`: slots of the gateway processes; `adopt`: from now on this is the
    fleet file, written down for gateways; returns its digest."""

    units: Units
    workers: Workers
    observer: Observer
    state: StateDir
    timing: Callable[[], Timing]
    gateways: Sequence[str]
    rollouts: Rollouts
    adopt: Callable[[FleetFile], int]


Action = Callable[[Step], Awaitable[None]]
Named = tuple[str, Action]


class Job:
    """One change. `slugs`: what the slots of each model are named after; `options`: of rollouts."""

    def __init__(
        self,
        site: Site,
        before: FleetFile,
        wanted: FleetFile,
        slugs: Mapping[str, str],
        options: Options,
        applying: Applying,
    ) -> None:
        self._site = site
        self._before = {entry.name: entry for entry in before.models}
        self._running = before
        self._adopted = False
        self._wanted = {entry.name: entry for entry in wanted.models}
        self._fleet = _without_swaps(before, wanted, {model.name for model in applying.plan.swaps})
        self._slugs = slugs
        self._options = options
        self._leaving = Leaving(site.workers, site.observer, site.timing())
        self._stages: list[list[tuple[Step, Action]]] = []
        self.applying = applying

    def prepare(self, removed_first: bool) -> None:
        """Lists the steps. `removed_first`: what comes needs the memory of what goes."""
        plan = self.applying.plan
        self._stage(("gateways take the file", self._announce))
        if plan.replaces_gateways:
            self._stage(("gateway processes are replaced", self._replace_gateways))
        going = [named for model in plan.models for named in self._going(model)]
        coming = [named for model in plan.models for named in self._coming(model)]
        for stage in (going, coming) if removed_first else ([*going, *coming],):
            self._stage(*stage)

    def _stage(self, *pairs: Named) -> None:
        """Things that are done at the same time, after those before them."""
        stage = [(Step(name=name), action) for name, action in pairs]
        self.applying.steps += [step for step, _ in stage]
        self._stages.append(stage)

    async def run(self) -> FleetFile:
        """Returns the file that the fleet runs by from now on."""
        for stage in self._stages:
            await asyncio.gather(*(self._do(step, action) for step, action in stage))
            if not self._adopted:
                return self._running
        return self._fleet

    async def _do(self, step: Step, action: Action) -> None:
        step.state = "running"
        try:
            await action(step)
            step.state = "done"
        except StepFailed as error:
            step.state, step.detail = "failed", str(error)
        except OSError as error:
            step.state, step.detail = "failed", _unwritten(error)

    # --- gateways

    async def _announce(self, step: Step) -> None:
        """Names first to workers, which must know them when gateways do. Nothing else is done where that
        fails, or where the file can't be written down: all models stay as they were."""
        stay = [entry for entry in self._fleet.models if entry.name in self._before]
        for entry in stay:
            await self._tell_names(entry, self._before[entry.name], step)
        self._site.rollouts.models.write_down(stay)
        digest = self._site.adopt(self._fleet)
        self._adopted = True
        for entry in stay:
            self._configure(entry)
        await self._taken(digest, step)

    def _configure(self, entry: ModelEntry) -> None:
        """What the file says of the model, without touching its processes."""
        self._site.rollouts.models.configure(entry)
        runs = self._site.rollouts.models.runs(entry.name)
        for slot in self._filled(entry.name):
            self._site.workers.update(replace(slot, entry=runs))

    async def _tell_names(self, entry: ModelEntry, before: ModelEntry, step: Step) -> None:
        """An alias that goes stays known to workers, for requests on their way: gateways don't find it."""
        aliases = dict.fromkeys((*entry.aliases, *before.aliases))
        if set(aliases) == set(before.aliases):
            return
        workers = self._site.workers
        statuses = [unit.status for slot in workers.slots(entry.name) if (unit := workers.unit(slot.name))]
        made = [
            Peer(workers.uds(one.slot, one.generation), one.slot, one.generation, entry.name)
            for one in statuses
            if one.state in ("starting", "ready", "draining")  # those to come have them in their options
        ]
        async with peers(made):
            await asyncio.gather(*(self._tell(peer, [entry.name, *aliases], step) for peer in made))

    async def _tell(self, peer: Peer, names: list[str], step: Step) -> None:
        deadline = time.monotonic() + TAKEN_WITHIN
        while self._lives(peer):
            try:
                await peer.post("/admin/names", {"names": names})
                return
            except Refused as error:
                raise StepFailed(f"{peer.target} doesn't take the names: {error}") from None
            except Lost as error:  # it may not listen yet
                if time.monotonic() > deadline:
                    raise StepFailed(f"{peer.target} doesn't take the names: {error}") from None
                step.say(f"{peer.target} is to take the names")
            await asyncio.sleep(POLL)

    def _lives(self, peer: Peer) -> bool:
        unit = self._site.workers.unit(peer.slot)
        return unit is not None and unit.status.generation == peer.generation and unit.status.pid is not None

    async def _taken(self, digest: int, step: Step) -> None:
        """Until all gateways that live follow the file."""
        deadline = time.monotonic() + TAKEN_WITHIN
        while others := self._site.observer.not_following(digest):
            names = ", ".join(sorted(others))
            if time.monotonic() > deadline:
                raise StepFailed(f"not taken over by {names} within {TAKEN_WITHIN:g} s")
            step.say(f"not yet taken over by {names}")
            await asyncio.sleep(POLL)
        step.say("")

    async def _replace_gateways(self, step: Step) -> None:
        """One after another; the first that doesn't come up takes the settings back for all."""
        replaced: list[Unit] = []
        for slot in self._site.gateways:
            unit = self._site.units.get(slot)
            if unit is None:
                continue
            step.say(slot)
            replaced.append(unit)
            problem = await self._replaced(unit)
            if problem is not None:
                self._fleet = self._fleet.model_copy(update={"gateway": self._running.gateway})
                self._site.adopt(self._fleet)
                for one in replaced:
                    await self._replaced(one)
                raise StepFailed(f"the gateways' settings were taken back: {slot} {problem}")
        step.say("")

    async def _replaced(self, unit: Unit) -> str | None:
        """Why its next process doesn't serve, if it doesn't."""
        before = unit.status.generation
        timing = self._site.timing()
        await unit.renew(timing.drain + timing.stop_margin)
        self._site.units.revive(unit.status.slot)
        while True:
            status = unit.status
            if status.generation > before:
                if status.state == "ready":
                    return None
                if status.state in ("backoff", "failed"):
                    return status.error or status.state
            await asyncio.sleep(POLL)

    # --- models

    def _going(self, model: ModelPlan) -> list[Named]:
        async def remove(step: Step) -> None:
            try:
                self._site.rollouts.models.forget(model.name)  # first: nobody can begin one any more
            except OSError as error:
                raise StepFailed(f"that it goes can't be written down: {error}") from None
            _note_cut(step, await self._leaving.model(model.name, step.say))

        async def shrink(step: Step) -> None:
            wanted = {slot.name for slot in self._slots(model.name)}
            extra = [slot for slot in self._filled(model.name) if slot.name not in wanted]
            _note_cut(step, await self._leaving.slots(model.name, extra, step.say))

        old, new = model.replicas
        if model.action == "removed":
            return [(f"{model.name} goes", remove)]
        return [(f"{model.name} from {old} to {new} workers", shrink)] if new < old else []

    def _coming(self, model: ModelPlan) -> list[Named]:
        async def add(step: Step) -> None:
            self._site.rollouts.bring_up(self._wanted[model.name], self._slugs[model.name])
            await self._started(self._site.workers.slots(model.name), step)

        async def grow(step: Step) -> None:
            filled = {slot.name for slot in self._filled(model.name)}
            missing = [slot for slot in self._slots(model.name) if slot.name not in filled]
            for slot in missing:
                self._site.workers.add(slot)
            await self._started(missing, step)

        async def revive(step: Step) -> None:
            failed = self._failed(model.name)
            for slot in failed:
                self._site.workers.add(slot)
            await self._started(failed, step)

        async def swap(step: Step) -> None:
            await self._swap(model, step)

        old, new = model.replicas
        if model.action == "added":
            return [(f"{model.name} comes", add)]
        if model.has("swap"):  # the new version has as many workers as it is to have
            return [(f"{model.name} is swapped", swap)]
        again = [(f"{model.name} starts again", revive)] if new and self._failed(model.name) else []
        return [*again, *([(f"{model.name} from {old} to {new} workers", grow)] if new > old else [])]

    def _failed(self, name: str) -> list[Slot]:
        """Those that nothing else would start again."""
        workers = self._site.workers
        units = [(slot, workers.unit(slot.name)) for slot in self._filled(name)]
        return [slot for slot, unit in units if unit is not None and unit.status.state == "failed"]

    def _slots(self, name: str) -> list[Slot]:
        """Those that the model is to have, in the variant that it runs in."""
        rollouts = self._site.rollouts
        return slots_for(rollouts.models.runs(name), self._slugs[name], rollouts.models.variant(name))

    def _filled(self, name: str) -> list[Slot]:
        """Those that it has, without a rollout's standby, which is the rollout's business."""
        return self._site.workers.slots(name, self._site.rollouts.models.variant(name))

    async def _started(self, slots: Sequence[Slot], step: Step) -> None:
        """Until each is ready, or has failed for good."""
        while True:
            found = [unit.status for slot in slots if (unit := self._site.workers.unit(slot.name))]
            pending = [status for status in found if status.state not in ("ready", "draining", "failed")]
            if not pending:
                break
            step.say(", ".join(map(_how_far, pending)))
            await asyncio.sleep(POLL)
        failed = [status for status in found if status.state == "failed"]
        if failed:
            raise StepFailed("; ".join(f"{one.slot}: {one.error}" for one in failed))
        step.say("")

    async def _swap(self, model: ModelPlan, step: Step) -> None:
        """By a rollout, which may come to another end."""
        rollouts, wanted = self._site.rollouts, self._wanted[model.name]
        rollouts.release(model.name)
        try:
            rollout = await rollouts.start(model.name, swap_request(model, wanted, self._options))
            while not rollout.terminal:
                step.say(_rollout_line(rollout))
                rollout = await rollouts.wait(model.name, rollout.revision, 10.0)
        except SwapError as error:
            raise StepFailed(str(error)) from None
        if rollout.outcome != "completed":
            self.applying.rolled_back = True
            raise StepFailed(f"{rollout.phase}: {rollout.reason}")
        step.say("")
        self._site.rollouts.models.write_down([wanted])
        self._configure(wanted)
        models = tuple(wanted if one.name == model.name else one for one in self._fleet.models)
        fleet = self._fleet.model_copy(update={"models": models})
        self._site.adopt(fleet)
        self._fleet = fleet


def _without_swaps(before: FleetFile, wanted: FleetFile, swapped: set[str]) -> FleetFile:
    """The wanted file, with source and options as before where they take a rollout, which may fail."""
    known = {entry.name: {"source": entry.source, "worker": entry.worker} for entry in before.models}
    models = [
        entry.model_copy(update=known[entry.name]) if entry.name in swapped else entry
        for entry in wanted.models
    ]
    return wanted.model_copy(update={"models": tuple(models)})


def swap_request(model: ModelPlan, wanted: ModelEntry, options: Options) -> StartRequest:
    """The rollout to what the file says."""
    prefix = "models[].worker."
    changed = [change.key.removeprefix(prefix) for change in model.changes if change.key.startswith(prefix)]
    values = wanted.worker.model_dump()
    return StartRequest(source=wanted.source, set={name: values[name] for name in changed}, options=options)


def _unwritten(error: OSError) -> str:
    return f"{error.filename or 'a file of the state directory'} can't be written: {error.strerror}"


def _note_cut(step: Step, cut: int) -> None:
    step.say(f"{cut} requests that didn't end in time were ended with an error" if cut else "")


def _rollout_line(rollout: Rollout) -> str:
    at = f" at {rollout.step_name}" if rollout.step_name else ""
    return f"{rollout.phase}{at}{', paused' if rollout.paused else ''}"


def _how_far(status: UnitStatus) -> str:
    if status.state != "starting":
        return f"{status.slot}: {status.state}" + (f", {status.error}" if status.error else "")
    percent = f" {100 * status.done / status.total:.0f}%" if status.total else ""
    return f"{status.slot}: {status.phase}{percent}"
