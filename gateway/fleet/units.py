"""A fleet's processes, each under a task of its own; they may come and go while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

from gateway.fleet.backends.base import ROLES, Backend, Found
from gateway.fleet.unit import StartLocks, Timing, Unit, UnitSpec, UnitStatus


class Units:
    """All units of a fleet, in the order in which they came.

    `add` starts a unit, `remove` ends it and forgets it. A slot that is filled again goes on with the
    generation after its last one, so that no two processes ever have the same slot and generation.
    `ended` is done when nothing is left that could serve, or with the exception of a unit's task: a mistake
    of ours. Units that aren't `repaired` (a rollout's) are nobody's hope.

    `found`: processes that an earlier supervisor started, by slot; `add` takes over the one that is in the
    slot. `generations`: of the slots' last processes. `endures`: it isn't over when nothing can serve.
    """

    def __init__(
        self,
        backend: Backend,
        timing: Timing,
        on_change: Callable[[UnitStatus], None],
        *,
        found: Mapping[str, Found] = MappingProxyType({}),
        generations: Mapping[str, int] = MappingProxyType({}),
        endures: bool = False,
    ) -> None:
        self._backend = backend
        self._timing = timing
        self._on_change = on_change
        self._locks = StartLocks()
        self._units: dict[str, Unit] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._generations = dict(generations)
        self._found = dict(found)
        self.taken_over: list[str] = []  # slots whose processes were found
        self._endures = endures
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def statuses(self) -> tuple[UnitStatus, ...]:
        return tuple(unit.status for unit in self._units.values())

    def get(self, slot: str) -> Unit | None:
        return self._units.get(slot)

    def outlived(self, slot: str) -> bool:
        """Whether an earlier supervisor's process is in the slot, which `add` takes over."""
        return slot in self._found

    def add(self, spec: UnitSpec, *, repaired: bool = True) -> Unit:
        """Starts the unit, or finds the one that is in the slot; one that has failed there starts again."""
        unit = self._units.get(spec.slot)
        if unit is None:
            if spec.slot in self._found:
                self.taken_over.append(spec.slot)
            unit = Unit(
                spec,
                self._backend,
                self._locks,
                self._timing,
                self._on_change,
                generation=self._generations.get(spec.slot, 0),
                found=self._found.pop(spec.slot, None),
            )
            self._units[spec.slot] = unit
            self._on_change(unit.status)
        unit.repaired = repaired
        self._run(unit)
        return unit

    def revive(self, slot: str) -> None:
        """One that has failed for good starts again."""
        unit = self._units.get(slot)
        if unit is not None:
            self._run(unit)

    def set_timing(self, timing: Timing) -> None:
        """For what begins from now on."""
        self._timing = timing
        for unit in self._units.values():
            unit.set_timing(timing)

    def _run(self, unit: Unit) -> None:
        slot = unit.status.slot
        task = self._tasks.get(slot)
        if task is None or task.done():
            task = self._tasks[slot] = asyncio.create_task(unit.run(), name=slot)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.ended.done():
            return
        error = task.exception()  # a unit's run ends only when it has failed for good
        if error is not None:
            self.ended.set_exception(error)
        elif not self._endures and self._hopeless():
            self.ended.set_result(None)

    def _hopeless(self) -> bool:
        lasting = [unit.status for unit in self._units.values() if unit.repaired]
        states = {role: [s.state for s in lasting if s.role == role] for role in ("gateway", "worker")}
        return any(group and all(state == "failed" for state in group) for group in states.values())

    async def remove(self, slot: str, patience: float) -> None:
        """Ends the unit's process (asks, waits `patience` seconds, kills) and forgets it; none: nothing."""
        unit = self._units.get(slot)
        if unit is None:
            return
        await self._cancel([slot])
        await unit.stop(patience)
        self._generations[slot] = unit.status.generation
        self._units.pop(slot, None)
        self._tasks.pop(slot, None)

    async def shut_down(self, patience: Callable[[], float]) -> None:
        """Ends all: gateways first, so that requests in flight end while their workers are still there."""
        await self._cancel(list(self._tasks))
        for role in ROLES:
            group = [unit for unit in self._units.values() if unit.status.role == role]
            await asyncio.gather(*(unit.stop(patience()) for unit in group))

    async def leave(self) -> None:
        """Looks after nothing any more; the processes go on as they are."""
        await self._cancel(list(self._tasks))

    async def end_strangers(self, patience: float) -> None:
        """Ends what was found in slots that are no longer there."""
        found, self._found = self._found, {}
        for role in ROLES:
            group = [one.process for one in found.values() if one.role == role]
            await asyncio.gather(*(process.stop(patience) for process in group))

    def kill(self) -> None:
        """Ends every process now; what waits for its end returns soon after."""
        for unit in self._units.values():
            unit.kill()

    async def _cancel(self, slots: list[str]) -> None:
        tasks = [self._tasks[slot] for slot in slots if slot in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
