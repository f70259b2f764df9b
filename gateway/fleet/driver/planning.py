"""Does a rollout fit, and how long will it take?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from gateway.config import FleetFile
from gateway.fleet.commands import Slot, other
from gateway.fleet.driver.asked import Plan, StartRequest, SwapError, changes_between, expected_seconds
from gateway.fleet.driver.models import Model
from gateway.fleet.errors import FleetError
from gateway.fleet.ledger import Ledger, make_ledger, this_machine
from gateway.fleet.rollout import Version
from gateway.fleet.unit import UnitStatus
from gateway.fleet.workers import Workers


class Planner:
    """Asks the memory ledger; `note` is to be told of workers' statuses, for the time that a start takes."""

    def __init__(self, fleet: FleetFile, workers: Workers) -> None:
        self._fleet = fleet
        self._workers = workers
        self._began: dict[str, float] = {}  # slot -> when its process was started
        self._took: dict[str, float] = {}  # model -> seconds of its last start

    def note(self, status: UnitStatus) -> None:
        if status.state == "starting" and status.slot not in self._began:
            self._began[status.slot] = time.monotonic()
        elif status.state == "ready" and status.slot in self._began:
            self._took[status.model or ""] = time.monotonic() - self._began.pop(status.slot)
        elif status.state not in ("starting", "waiting"):
            self._began.pop(status.slot, None)

    async def plan(self, models: Iterable[Model], model: Model, new: Version, asked: StartRequest) -> Plan:
        """Of a rollout of `model`, one of all the `models` that are there."""
        standby = model.slots(new, other(model.variant))
        alone = asked.options.strategy == "recreate"
        beside = [one for one in models if not (alone and one is model)]
        slots = {slot.name: slot for one in beside for slot in (*one.standby(), *self._there(one))}
        ledger = await asyncio.to_thread(self._ledger, [*slots.values(), *standby])
        names = {slot.name for slot in standby}
        workers = tuple(worker for worker in ledger.workers if worker.slot in names)
        return Plan(
            model=model.entry.name,
            old=model.version,
            new=new,
            changes=changes_between(model.version, new),
            options=asked.options,
            workers=workers,
            places=ledger.places,
            misfit=None if alone else _misfit(ledger, names),
            problem=_problem(ledger, names) or (_misfit(ledger, names) if alone else None),
            unknown=next((worker.unknown for worker in workers if worker.unknown), None),
            seconds=expected_seconds(self._took.get(model.entry.name), asked.options),
            invalid=any(worker.invalid for worker in workers),
        )

    def _there(self, model: Model) -> list[Slot]:
        return self._workers.slots(model.entry.name)

    def _ledger(self, slots: Sequence[Slot]) -> Ledger:
        try:
            return make_ledger(self._fleet, this_machine(), slots)
        except FleetError as error:
            raise SwapError(str(error), error.exit_code) from None


def _problem(ledger: Ledger, standby: set[str]) -> str | None:
    """Why the standby can't run by itself."""
    mine = [worker for worker in ledger.workers if worker.slot in standby and worker.problem]
    return "; ".join(f"{worker.slot}: {worker.problem}" for worker in mine) or None


def _misfit(ledger: Ledger, standby: set[str]) -> str | None:
    """Why the standby doesn't fit beside what else is in the ledger, in its words."""
    full = {place.name for place in ledger.places if place.left < 0}
    places = {worker.place for worker in ledger.workers if worker.slot in standby} & full
    return "; ".join(one for one in ledger.problems if one.partition(":")[0] in places) or None
