"""Worker units and the routes to them: what a fleet's models run on, to be changed while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from contracts.options import WorkerOptions
from gateway.fleet.commands import Commands, Slot
from gateway.fleet.probes import WorkerProbe
from gateway.fleet.publisher import Publisher
from gateway.fleet.statedir import StateDir
from gateway.fleet.unit import Unit, UnitSpec, UnitStatus
from gateway.fleet.units import Units


class Workers:
    """Starts and ends workers by slot, and keeps the routes document true to what they are.

    A slot says it all: its name, its variant, and the model's entry (source, options) that it runs. `add`
    fills it, `remove` empties it and takes it out of the routes; a variant's weight is the publisher's
    (`publisher.split`), and one that has none yet gets no requests. `watchers` are told each new status of a
    worker, after the routes have it. `memory`: bytes of the host's that a worker may take. `commands` may be
    replaced, for processes that start from then on.
    """

    def __init__(
        self,
        units: Units,
        publisher: Publisher,
        commands: Commands,
        state: StateDir,
        memory: Callable[[Slot], int | None] = lambda slot: None,
    ) -> None:
        self._units = units
        self.commands = commands
        self._state = state
        self._memory = memory
        self._slots: dict[str, Slot] = {}
        self.publisher = publisher
        self.watchers: list[Callable[[UnitStatus], None]] = []

    def slots(self, model: str, variant: str | None = None) -> list[Slot]:
        """The filled slots of a model, or of one variant of it."""
        return [
            slot
            for slot in self._slots.values()
            if slot.entry.name == model and variant in (None, slot.variant)
        ]

    def unit(self, slot: str) -> Unit | None:
        return self._units.get(slot)

    def outlived(self, slot: str) -> bool:
        """Whether an earlier supervisor's worker is in the slot, which `add` takes over."""
        return self._units.outlived(slot)

    def uds(self, slot: str, generation: int) -> Path:
        """A socket per generation: a connection to an old process can never reach a new one."""
        return self._state.sockets / f"{slot}.{generation}.sock"

    def add(self, slot: Slot, *, repaired: bool = True) -> Unit:
        """Starts a worker in the slot, or finds the one that is there. `repaired`: started again when it
        ends; else its end is final, until it is added again."""
        self._slots[slot.name] = slot
        self.publisher.place(slot)
        return self._units.add(self._spec(slot), repaired=repaired)

    def update(self, slot: Slot) -> None:
        """What the slot's next process runs, and the routes say of it; the one that runs isn't touched."""
        self._slots[slot.name] = slot
        self.publisher.place(slot)

    async def remove(self, slot: str, patience: float) -> None:
        """Ends the worker (asks, waits `patience` seconds, kills all of it) and empties the slot."""
        await self._units.remove(slot, patience)
        self._slots.pop(slot, None)
        self.publisher.drop(slot)

    def unreachable(self) -> list[UnitStatus]:
        """Those that serve on a socket which somebody has taken away (a tidy-up of /tmp): nobody can connect
        to them any more."""
        units = [unit for slot in self._slots if (unit := self._units.get(slot)) is not None]
        ready = [unit.status for unit in units if unit.status.state == "ready"]
        return [one for one in ready if not self.uds(one.slot, one.generation).is_socket()]

    async def renew(self, slot: str, patience: float) -> None:
        """The next process takes the place of the worker's, which may finish what it has."""
        unit = self._units.get(slot)
        if unit is not None:
            await unit.renew(patience)

    def changed(self, status: UnitStatus) -> None:
        """A worker has a new status."""
        self.publisher.update(status, f"unix:{self.uds(status.slot, status.generation)}")
        for watcher in self.watchers:
            watcher(status)

    def _probe(self, slot: Slot, generation: int) -> WorkerProbe:
        names = (slot.entry.name, *slot.entry.aliases)
        return WorkerProbe(self.uds(slot.name, generation), slot.name, generation, names)

    def _spec(self, slot: Slot) -> UnitSpec:
        return UnitSpec(
            slot=slot.name,
            role="worker",
            model=slot.entry.name,
            variant=slot.variant,
            log=self._state.log(slot.name),
            launch=lambda generation: self.commands.worker(
                self._slots.get(slot.name, slot), generation, self.uds(slot.name, generation)
            ),
            probe=lambda generation: self._probe(self._slots.get(slot.name, slot), generation),
            gpus=gpus_of(slot.entry.worker),
            memory=lambda: self._memory(slot),
        )


def gpus_of(options: WorkerOptions) -> tuple[int, ...]:
    """The GPUs a worker will start on; none where there are none."""
    if options.device == "cpu" or (options.device == "auto" and not Path("/dev/nvidiactl").exists()):
        return ()
    return options.gpus or (0,)
