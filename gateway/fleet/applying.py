"""Brings a fleet that runs to another fleet file; gateway/fleet/changes.py says how."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from gateway.config import FleetFile
from gateway.fleet.changes import Job, Site, swap_request
from gateway.fleet.commands import slots_for, slugs_of
from gateway.fleet.driver.asked import SwapError
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.reconcile import Plan, reconcile
from gateway.fleet.rollout import Options
from gateway.fleet.steps import Applying, Step
from gateway.settings import ModelEntry

log = logging.getLogger(__name__)


class Applier:
    """Changes one fleet, one change at a time. `fleet`: the file that it runs by; `slugs`: what the slots of
    its models are named after."""

    def __init__(self, site: Site, fleet: FleetFile, slugs: Mapping[str, str]) -> None:
        self._site = site
        self._fleet = fleet
        self._slugs = dict(slugs)
        self._task: asyncio.Task[None] | None = None
        self._checking = self._is_closed = False
        self.latest: Applying | None = None

    def plan(self, wanted: FleetFile) -> Plan:
        """What `start` would do. SwapError while the fleet is being changed."""
        if self.latest is not None and self.latest.state == "running":
            raise SwapError("the fleet is already being changed; try again when that is over")
        return reconcile(self._fleet, wanted, self._runs())

    def _runs(self) -> dict[str, ModelEntry]:
        return {entry.name: self._site.rollouts.models.runs(entry.name) for entry in self._fleet.models}

    async def start(self, wanted: FleetFile, options: Options, removed_first: bool = False) -> Applying:
        """Begins; `latest` says how far it is. `options`: of the rollouts that it takes; `removed_first`: the
        memory of models that go is needed for those that come. SwapError when it can't be done while the
        fleet runs, or something else is changing it; nothing has changed then."""
        self._refuse_at_the_end()
        if self._checking:
            raise SwapError("the fleet is about to be changed; try again when that is over")
        self._checking = True
        try:
            plan = await self.check(wanted, options)
            self._refuse_at_the_end()
            self._refuse_busy(plan)  # somebody may have begun a rollout meanwhile
            changed = (*plan.by_action("changed"), *plan.by_action("removed"))
            self._site.rollouts.reserve(changed)
        finally:
            self._checking = False
        self._slugs = slugs = slugs_of(wanted.models, self._slugs)
        self.latest = Applying(plan=plan, steps=[], started=time.time())
        job = Job(self._site, self._fleet, wanted, slugs, options, self.latest)
        job.prepare(removed_first)
        self._task = asyncio.create_task(self._run(job, changed), name="config apply")
        return self.latest

    async def _run(self, job: Job, changed: Sequence[str]) -> None:
        applying = job.applying
        try:
            self._fleet = await job.run()
        except Exception:
            log.exception("changing the fleet")
            applying.steps.append(Step(name="fleet", state="failed", detail="a mistake of ours, see the log"))
        finally:
            self._site.rollouts.release(*changed)
            applying.ended = time.time()
            applying.state = "done" if all(step.state == "done" for step in applying.steps) else "failed"

    async def aclose(self) -> None:
        """Leaves the change as it is: the fleet ends."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, wanted: FleetFile, options: Options) -> Plan:
        """The plan, if nothing that is known speaks against it; SwapError as of `start`."""
        plan = self.plan(wanted)
        if plan.restarts:
            keys = ", ".join(change.key for change in plan.restarts)
            raise SwapError(
                f"{keys} can't change while the fleet runs: `pagefleet down`, then `pagefleet up`",
                EXIT_INVALID,
            )
        self._refuse_busy(plan)
        problems = list(self._too_long(plan, wanted))
        if problems:
            raise SwapError("; ".join(problems), EXIT_INVALID)
        for model in plan.swaps:
            entry = next(entry for entry in wanted.models if entry.name == model.name)
            swap = await self._site.rollouts.plan(model.name, swap_request(model, entry, options))
            if swap.problem:
                raise SwapError(f"{swap.problem}; nothing was changed", swap.exit_code)
            if swap.misfit:
                raise SwapError(
                    f"{model.name}: the old and the new version don't fit together: {swap.misfit}; "
                    "--strategy recreate makes users wait instead",
                    swap.exit_code,
                )
        return plan

    def _refuse_at_the_end(self) -> None:
        if self._is_closed:
            raise SwapError("the fleet is ending; nothing was changed")

    def _refuse_busy(self, plan: Plan) -> None:
        busy = [line for model in plan.models if (line := self._busy(model.name, model.action))]
        if busy:
            raise SwapError("; ".join(busy))

    def _busy(self, name: str, action: str) -> str | None:
        rollout = self._site.rollouts.under_way(name) if action in ("removed", "changed") else None
        if rollout is None:
            return None
        return f"rollout {rollout} of {name} isn't over; wait for it, or `pagefleet swap abort {name}`"

    def _too_long(self, plan: Plan, wanted: FleetFile) -> Iterator[str]:
        slugs = slugs_of(wanted.models, self._slugs)
        for entry in wanted.models:
            if entry.name in plan.by_action("added"):
                for slot in slots_for(entry, slugs[entry.name], "b"):
                    problem = self._site.state.socket_problem(slot.name)
                    if problem is not None:
                        yield problem
