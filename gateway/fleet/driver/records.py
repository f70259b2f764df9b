"""Rollouts on disk: the state of each model's last one, what the judge compares with, and the history."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.fleet.driver.measure import Sample
from gateway.fleet.rollout import Record, Rollout, decode, encode
from gateway.fleet.statedir import read_file, write_durably

log = logging.getLogger(__name__)

_LONGEST = 80


class Records:
    """Files of one directory: MODEL.json (the state), MODEL.before.json (what the old version did before
    the rollout), MODEL.history.jsonl (a line for each rollout that is over)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def rollouts(self) -> Iterator[Rollout]:
        """The last rollout of every model that had one. What can't be read is left where it is."""
        for path in sorted(self._directory.glob("*.json")):
            if path.name.endswith(".before.json"):
                continue
            try:
                yield decode(read_file(path))
            except (OSError, ValueError, RecursionError) as error:
                log.error("the rollout in %s can't be taken up again: %s", path, error)

    def save(self, rollout: Rollout) -> None:
        """Durably; OSError when there is no room."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self._path(rollout.model, ".json"), encode(rollout))

    def save_before(self, rollout: Rollout, sample: Sample) -> None:
        """What the primary did before, for as long as the rollout goes on."""
        write_durably(self._path(rollout.model, ".before.json"), msgspec.json.encode((rollout.id, sample)))

    def before(self, rollout: Rollout) -> Sample | None:
        try:
            data = read_file(self._path(rollout.model, ".before.json"))
            of, sample = msgspec.json.decode(data, type=tuple[str, Sample])
        except (OSError, ValueError, RecursionError):
            return None
        return sample if of == rollout.id else None

    def history(self, model: str) -> list[Record]:
        """The model's rollouts that are over, the oldest first. A torn last line isn't one."""
        found = []
        try:
            lines = read_file(self._path(model, ".history.jsonl")).splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=Record))
            except (ValueError, RecursionError) as error:
                log.warning("a line of the history of %s can't be read: %s", model, error)
        return found

    def append(self, record: Record) -> None:
        """Once, however often it is called for a rollout. OSError when there is no room."""
        if any(known.id == record.id for known in self.history(record.model)):
            return
        path = self._path(record.model, ".history.jsonl")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"\n" if _is_torn(path) else b"")
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _path(self, model: str, ending: str) -> Path:
        """Named after the model; a name that doesn't suit a file gets its digest."""
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", model)[:_LONGEST]
        if stem != model:
            stem += "." + hashlib.sha256(model.encode()).hexdigest()[:8]
        return self._directory / (stem + ending)


def _is_torn(path: Path) -> bool:
    """Whether a crash left half a line at the end."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
