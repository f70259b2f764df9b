"""Limits that were set while the fleet runs: a map from subjects to bounds, in a file of the state directory.

Where gateways share a Redis they share this map through it (`redis_overrides.py`). Each entry carries the
time at which it was set, and the newest of a subject wins, wherever it was set: so maps can be merged in any
order, and a Redis that comes back empty gets everything again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from gateway.limits.bounds import NOTHING, Bounds

FILE = "limits.json"  # in the state directory
KEPT_SECONDS = 30 * 86400  # for which it is remembered that limits were taken away again
DEFAULT = "default"
KINDS = (DEFAULT, "user", "key", "model")


class Entry(msgspec.Struct, frozen=True):
    """`at`: Unix time in microseconds; `bounds` that say nothing: they were unset."""

    at: int
    bounds: Bounds = NOTHING

    def __post_init__(self) -> None:
        """ValueError for bounds that no request could be checked against, wherever they came from."""
        self.bounds.check()


Overrides = Mapping[str, Entry]

_decoder = msgspec.json.Decoder(dict[str, Entry])
entry_decoder = msgspec.json.Decoder(Entry)


class OverridesUnusable(Exception):
    """The file of limits can't be read or written; says why."""


def subject(kind: str, name: str = "") -> str:
    """The key of an entry: "default", "user:ann", "key:ID" or "model:NAME"."""
    return kind if kind == DEFAULT else f"{kind}:{name}"


def merged(ours: Overrides, theirs: Overrides) -> dict[str, Entry]:
    """The newest entry of every subject; of two set at the same time, the same one everywhere."""
    result = dict(ours)
    for name, entry in theirs.items():
        known = result.get(name)
        if known is None or _newer(entry, known):
            result[name] = entry
    return result


def newer(ours: Overrides, theirs: Overrides) -> dict[str, Entry]:
    """Our entries that `theirs` lacks or has older."""
    return {
        name: entry
        for name, entry in ours.items()
        if (known := theirs.get(name)) is None or _newer(entry, known)
    }


def remembered(entries: Overrides) -> dict[str, Entry]:
    """Without those of limits that were taken away so long ago that everybody has heard of it."""
    oldest = time.time_ns() // 1000 - KEPT_SECONDS * 1_000_000
    return {name: entry for name, entry in entries.items() if entry.bounds or entry.at > oldest}


def _newer(entry: Entry, than: Entry) -> bool:
    if entry.at != than.at:
        return entry.at > than.at
    return msgspec.json.encode(entry.bounds) > msgspec.json.encode(than.bounds)


def _changed(known: Entry | None, bounds: Bounds) -> Entry:
    """In place of `known`. A clock that went back must not make it lose against what it replaces."""
    return Entry(max(time.time_ns() // 1000, known.at + 1 if known else 0), bounds)


def _set_among(entries: Overrides, names: Iterable[str]) -> list[str]:
    return [name for name in names if (entry := entries.get(name)) is not None and entry.bounds]


class OverridesFile:
    """The file at `path`. `changed` tells whether it isn't the one that was read or written last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        return self._stat() != self._signature

    def read(self) -> dict[str, Entry]:
        """All entries; none when there is no file. OverridesUnusable when it can't be read."""
        signature = self._stat()
        try:
            entries = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            entries = {}
        except (OSError, ValueError, RecursionError) as error:
            raise OverridesUnusable(f"the limits in {self._path} can't be read: {error}") from None
        self._signature = signature
        return entries

    def put(self, name: str, bounds: Bounds) -> dict[str, Entry]:
        """Sets one subject's bounds, or unsets them; all entries after that."""
        with self._locked():
            entries = self.read()
            entries[name] = _changed(entries.get(name), bounds)
            self._write(entries)
        return entries

    def unset(self, names: Iterable[str]) -> None:
        """Takes away what is set for these subjects, if anything is. OverridesUnusable as `put`."""
        names = list(names)
        if not _set_among(self.read(), names):
            return
        with self._locked():
            entries = self.read()
            for name in _set_among(entries, names):
                entries[name] = _changed(entries[name], NOTHING)
            self._write(entries)

    def merge(self, theirs: Overrides) -> dict[str, Entry]:
        """Takes in what is newer in `theirs`; all entries after that."""
        with self._locked():
            entries = self.read()
            if newer(theirs, entries):
                entries = merged(entries, theirs)
                self._write(entries)
        return entries

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _write(self, entries: Overrides) -> None:
        """Replaces the file as a whole, durably."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(remembered(entries)), indent=1))
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, self._path)
        self._signature = self._stat()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, over all processes; OverridesUnusable when the directory can't be written."""
        try:
            with open(self._path.with_name(self._path.name + ".lock"), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise OverridesUnusable(f"the limits in {self._path} can't be written: {error}") from None
