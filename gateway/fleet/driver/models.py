"""What each model of a fleet runs, and where; its rollout, if there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from gateway.fleet.commands import Slot, Variant, other, slots_for, slugs_of
from gateway.fleet.driver.asked import SwapError
from gateway.fleet.driver.driver import Driver
from gateway.fleet.driver.records import Records
from gateway.fleet.driver.survival import primary_runs, standby_runs
from gateway.fleet.errors import EXIT_INVALID, no_such_model
from gateway.fleet.publisher import Split
from gateway.fleet.rollout import Rollout, Version, record_of
from gateway.fleet.rollout.model import Side
from gateway.fleet.state import FULL_WEIGHT
from gateway.fleet.versions import Running, Versions, can_run, entry_of, file_version
from gateway.fleet.workers import Workers
from gateway.settings import ModelEntry

log = logging.getLogger(__name__)


@dataclass
class Model:
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

    def sides(self, rollout: Rollout) -> dict[Side, Sequence[Slot]]:
        """The slots of a rollout that isn't over."""
        return {
            "primary": self.slots(rollout.old, self.variant),
            "standby": self.slots(rollout.new, other(self.variant)),
        }

    def standby(self) -> list[Slot]:
        """Of the rollout that is under way, also before it is there; none while that goes back."""
        if self.driver is None or self.driver.rollout.going_back:
            return []
        return self.slots(self.driver.rollout.new, other(self.variant))

    @property
    def rollout(self) -> Rollout | None:
        return self.driver.rollout if self.driver is not None else self.last


class Models:
    """All models. What they run is known to `versions`, their rollouts to `records`; both are on disk."""

    def __init__(self, workers: Workers, records: Records, versions: Versions) -> None:
        self._workers = workers
        self._records = records
        self._versions = versions
        self._models: dict[str, Model] = {}
        self._unfinished = {rollout.model: rollout for rollout in records.rollouts()}

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def get(self, name: str | None) -> Model | None:
        """By its name alone."""
        return self._models.get(name or "")

    def has(self, name: str) -> bool:
        """By its name or an alias."""
        return any(name in (model.entry.name, *model.entry.aliases) for model in self)

    def named(self, name: str) -> Model:
        """By its name or an alias. SwapError when there is none."""
        for model in self:
            if name in (model.entry.name, *model.entry.aliases):
                return model
        names = (name for model in self for name in (model.entry.name, *model.entry.aliases))
        raise SwapError(no_such_model(name, names), EXIT_INVALID)

    def bring_up(self, entry: ModelEntry, slug: str | None = None) -> Model:
        """Starts the model's workers as its file, or the rollout that was under way, wants them."""
        model = self._models[entry.name] = self._restored(entry, slug or slugs_of([entry])[entry.name])
        if model.last is None or model.last.terminal:
            self._start(model)
        else:
            self._start_both(model, model.last)
        return model

    def _start(self, model: Model) -> None:
        slots = model.slots(model.version, model.variant)
        publisher = self._workers.publisher
        for slot in slots:
            publisher.place(slot)
        publisher.split(model.entry.name, Split(weights={model.variant: FULL_WEIGHT}))
        for slot in slots:
            self._workers.add(slot)

    def _start_both(self, model: Model, rollout: Rollout) -> None:
        """In the middle of a rollout: what of both sides is to run, or has outlived."""
        sides = model.sides(rollout)
        publisher = self._workers.publisher
        for slot in (*sides["primary"], *sides["standby"]):
            publisher.place(slot)
        split = Split(
            weights={model.variant: rollout.primary_bp, other(model.variant): rollout.standby_bp},
            hold=rollout.hold,
            rollout_id=rollout.id,
            salt=rollout.id,
        )
        publisher.split(model.entry.name, split)
        model.standby_lives = all(self._workers.outlived(slot.name) for slot in sides["standby"])
        runs_of: dict[Side, bool] = {"primary": primary_runs(rollout), "standby": standby_runs(rollout)}
        for side, runs in runs_of.items():
            for slot in sides[side]:
                if runs or self._workers.outlived(slot.name):
                    self._workers.add(slot, repaired=runs)

    def _restored(self, entry: ModelEntry, slug: str) -> Model:
        """A model as it is known on disk."""
        rollout = self._unfinished.pop(entry.name, None)
        if rollout is not None and not can_run(entry, rollout.old, rollout.new):
            rollout = None
        running = self._versions.of(entry)
        last = self._versions.last(entry.name)
        if rollout is not None and not rollout.terminal:
            variant: Variant = last.variant if last is not None else ""
            return Model(entry, slug, rollout.old, variant, rollout)
        if rollout is not None:
            self._complete_record(entry, rollout, last)
            running = self._versions.of(entry)
        if running is None:
            return Model(entry, slug, file_version(entry), "", rollout)
        if running.version != file_version(entry):
            log.warning("%s", self._versions.in_words(entry, running))
        return Model(entry, slug, running.version, running.variant, rollout)

    def _complete_record(self, entry: ModelEntry, rollout: Rollout, last: Running | None) -> None:
        """What a crash after the last transition has left undone."""
        records = self._records
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

    def write_down(self, entries: Iterable[ModelEntry]) -> None:
        """What versions are by these entries of the fleet file, before it is taken over. OSError when that
        can't be written; nothing has changed then."""
        found = [(entry, self._versions.last(entry.name)) for entry in entries]
        self._versions.record(
            {
                entry.name: msgspec.structs.replace(
                    last,
                    version=self._version_by(entry),
                    variant=self._models[entry.name].variant,
                    file=file_version(entry),
                )
                for entry, last in found
                if last is not None
            }
        )

    def configure(self, entry: ModelEntry) -> None:
        """The fleet file says something else of the model; what runs isn't touched, and goes on to count as
        what the file leaves alone. After `write_down`."""
        model = self._models[entry.name]
        model.version = self._version_by(entry)
        model.entry = entry

    def _version_by(self, entry: ModelEntry) -> Version:
        """That which runs, in the words of the file where it is the file's."""
        runs = self.runs(entry.name)
        is_file = (runs.source, runs.worker) == (entry.source, entry.worker)
        return file_version(entry) if is_file else self._models[entry.name].version

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

    def finish(self, model: Model, rollout: Rollout) -> None:
        """The version that won is the model's, under supervision, and on record. OSError: to be repeated."""
        completed = rollout.phase == "completed"
        variant = other(model.variant) if completed else model.variant
        if completed:
            self._record(model.entry, rollout, variant)
        self._records.append(record_of(rollout))
        model.version, model.variant = (rollout.new if completed else rollout.old), variant
        model.last, model.driver = rollout, None
        for slot in model.slots(model.version, variant):
            self._workers.add(slot)
        self._workers.publisher.split(model.entry.name, Split(weights={variant: FULL_WEIGHT}))

    def _record(self, entry: ModelEntry, rollout: Rollout, variant: Variant) -> None:
        running = Running(
            version=rollout.new,
            variant=variant,
            rollout_id=rollout.id,
            since=rollout.ended or time.time(),
            file=file_version(entry),
        )
        self._versions.record({entry.name: running})
