"""Which version of each model runs, where that isn't the fleet file's: what rollouts have changed.

A version that a rollout brought in stays over restarts of the supervisor, until the fleet file says something
new about the model: then the file is younger than the rollout, and wins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from contracts.options import WorkerOptions
from gateway.fleet.commands import Variant
from gateway.fleet.rollout import Version
from gateway.fleet.statedir import read_file, write_durably
from gateway.settings import ModelEntry

log = logging.getLogger(__name__)


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What a model runs since a rollout. `file`: what the fleet file said of it then."""

    version: Version
    variant: Variant
    rollout_id: str
    since: float
    file: Version


def file_version(entry: ModelEntry) -> Version:
    """What the fleet file says."""
    return Version(source=entry.source, worker=options_of(entry.worker))


def options_of(worker: WorkerOptions) -> dict[str, Any]:
    """The options that are set, as JSON keeps them; sizes in bytes, which their written form would round."""
    options = worker.model_dump(exclude_unset=True)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def entry_of(entry: ModelEntry, version: Version) -> ModelEntry:
    """The file's entry with a version's source and options. pydantic.ValidationError for options that aren't
    any."""
    worker = WorkerOptions.model_validate(version.worker)
    return entry.model_copy(update={"source": version.source, "worker": worker})


def can_run(entry: ModelEntry, *versions: Version) -> bool:
    """Whether the options of what was written down are still some: a file of another release, or one that
    somebody has edited, must not keep a fleet from coming up. If not, the log says so."""
    try:
        for version in versions:
            entry_of(entry, version)
    except ValidationError as error:
        log.error("a version of %s from an earlier rollout can't be used: %s", entry.name, error)
        return False
    return True


class Versions:
    """The versions that run, by model, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running = _read(path)

    def of(self, entry: ModelEntry) -> Running | None:
        """What a rollout left the model on; None: it runs what its entry says."""
        running = self._running.get(entry.name)
        if running is None or running.file != file_version(entry):
            return None
        return running if can_run(entry, running.version) else None

    def in_words(self, entry: ModelEntry, running: Running) -> str:
        """That it isn't the fleet file's version which runs, and what leads back should it not start."""
        runs = running.version.source
        what = f"runs {runs}" if runs != entry.source else "runs with other options"
        return (
            f"{entry.name} {what} since rollout {running.rollout_id}, not what the fleet file says; "
            "`pagefleet swap undo` goes back. Where it doesn't start: bring the model back, change its entry "
            f"in the file, or take {self._path} away, and models run what the file says"
        )

    def last(self, model: str) -> Running | None:
        """The same, whatever the fleet file says by now."""
        return self._running.get(model)

    def record(self, running: Mapping[str, Running]) -> None:
        """From now on these models run this. OSError when it can't be written, and isn't so."""
        changed = {**self._running, **running}
        if changed != self._running:
            self._write(changed)

    def forget(self, model: str) -> None:
        """The model is gone. OSError when that can't be written."""
        if model in self._running:
            self._write({name: running for name, running in self._running.items() if name != model})

    def _write(self, running: dict[str, Running]) -> None:
        write_durably(self._path, msgspec.json.format(msgspec.json.encode(running), indent=1))
        self._running = running


def _read(path: Path) -> dict[str, Running]:
    try:
        return msgspec.json.decode(read_file(path), type=dict[str, Running])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.error("%s can't be used (%s); models run what the fleet file says", path, error)
        return {}
