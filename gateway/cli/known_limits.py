"""What a state directory tells of limits: the fleet file's, those of keys, and those set while running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from msgspec import UNSET

from gateway.cli.common import fail
from gateway.config import ConfigError, FleetFile, load_fleet
from gateway.fleet.errors import EXIT_FAILED, EXIT_INVALID, no_such_model
from gateway.fleet.statedir import StateDir
from gateway.identity.errors import KeyRefused, StoreUnusable
from gateway.identity.identity import NO_LIMITS, KeyLimits
from gateway.identity.record import KeyRecord, checked_user
from gateway.identity.secret import id_of
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.limits.bounds import FIELDS, Bounds, bounds_of
from gateway.limits.overrides import DEFAULT, FILE, KINDS, Entry, OverridesFile, OverridesUnusable, subject
from gateway.limits.table import LimitTable

_NO_SETTINGS = KeyLimits()  # a fleet file that is not known says nothing


class Subject(NamedTuple):
    """Whose limits: `kind` of KINDS, and a name unless it is the default."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


class KnownLimits:
    """What the state directory tells: limits of the fleet file (once the fleet has been up), of keys, and
    those that were set."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._fleet = _fleet(state.config)
        self.has_file = self._fleet is not None
        self._keys = _key_records(state.root / KEYS_FILE)
        default = self._fleet.gateway.limits.default if self._fleet else _NO_SETTINGS
        models = {entry.name: entry.limits for entry in self._fleet.models} if self._fleet else {}
        self._models = models
        self._table = LimitTable(default, models)
        self._default = default
        try:
            self.use(OverridesFile(state.root / FILE).read())
        except OverridesUnusable as error:
            fail(str(error))

    def use(self, entries: dict[str, Entry]) -> None:
        self.entries = entries
        self._table.apply(entries)

    def subject(self, kind: str, name: str | None) -> Subject:
        """Ends the command with code 2 for a name that is missing, too much, or nobody's."""
        if kind == DEFAULT:
            if name is not None:
                fail("default takes no name: it is for all users", EXIT_INVALID)
            return Subject(kind)
        if name is None:
            fail(f"which {kind}? give its name: `… {kind} NAME`", EXIT_INVALID)
        if kind == "key":
            return Subject(kind, self._key(name))
        if kind == "model":
            return Subject(kind, self._model(name))
        try:
            return Subject(kind, checked_user(name))
        except KeyRefused as error:
            fail(str(error), EXIT_INVALID)

    def _key(self, name: str) -> str:
        key_id = id_of(name)
        if key_id is None:  # it may be a part of a key, so it isn't repeated
            fail("this is no id of a key; `pagefleet keys list` shows them", EXIT_INVALID)
        if key_id not in self._keys:
            fail(
                f"there is no key {key_id} in {self._state.root}; `pagefleet keys list` shows them",
                EXIT_INVALID,
            )
        return key_id

    def refuse_ended(self, whose: Subject) -> None:
        """Ends the command with code 2 for a key that nobody can use any more."""
        if whose.kind == "key" and whose.name in _ended(self._keys.values()):
            fail(f"the key {whose.name} has ended: no limit matters to it", EXIT_INVALID)

    def forget_ended(self) -> None:
        forget_ended_keys(self._state, self._keys.values())

    def _model(self, name: str) -> str:
        if self._fleet is None or name in self._models:
            return name
        for entry in self._fleet.models:
            if name in entry.aliases:
                fail(f"'{name}' is an alias; limits are of the model: use {entry.name}", EXIT_INVALID)
        fail(no_such_model(name, self._models), EXIT_INVALID)

    def subjects(self) -> Iterator[Subject]:
        """The default, and everybody who has limits of their own."""
        yield Subject(DEFAULT)
        found = {Subject("model", name) for name, settings in self._models.items() if settings is not None}
        for record in self._keys.values():
            if record.limits != NO_LIMITS:
                found.add(Subject("key", record.id))
        for key, entry in self.entries.items():
            kind, _, name = key.partition(":")
            if entry.bounds and kind != DEFAULT:
                found.add(Subject(kind, name))
        found.difference_update(Subject("key", key_id) for key_id in _ended(self._keys.values()))
        yield from sorted(found, key=lambda one: (KINDS.index(one.kind), one.name))

    def _limits_of(self, key_id: str) -> KeyLimits:
        record = self._keys.get(key_id)
        return NO_LIMITS if record is None else record.limits

    def set_for(self, whose: Subject) -> Bounds:
        entry = self.entries.get(subject(*whose))
        return entry.bounds if entry is not None else Bounds()

    def below(self, whose: Subject) -> Bounds:
        """What the fleet file, or the key itself, says."""
        if whose.kind == DEFAULT:
            return bounds_of(self._default)
        if whose.kind == "key":
            return bounds_of(self._limits_of(whose.name))
        settings = self._models.get(whose.name) if whose.kind == "model" else None
        return bounds_of(settings) if settings is not None else Bounds()

    def effective(self, whose: Subject) -> Bounds:
        if whose.kind == DEFAULT:
            return self._table.default()
        if whose.kind == "user":
            return self._table.of_user(whose.name)
        if whose.kind == "key":
            return self._table.of_key(whose.name, self._limits_of(whose.name))
        return self._table.of_model(whose.name)

    def shown(self, whose: Subject) -> dict[str, Any]:
        """As JSON: `limits` are what holds, `set` what was set while running; null: no such limit."""
        holds = self.effective(whose)
        return {
            "kind": whose.kind,
            "name": whose.name or None,
            "limits": {name: None if (v := getattr(holds, name)) is UNSET else v for name in FIELDS},
            "set": self.set_for(whose),
        }


def forget_ended_keys(state: StateDir, records: Iterable[KeyRecord]) -> None:
    """Unsets, for good and on every gateway, the limits of those that were revoked or have expired.

    To be called by the commands that end keys or set limits: nothing else adds any, so there are never many.
    Keys that `records` doesn't have may be another machine's. What can't be done is only told.
    """
    try:
        OverridesFile(state.root / FILE).unset(subject("key", key_id) for key_id in _ended(records))
    except OverridesUnusable as error:
        click.echo(f"limits of keys that have ended stay for now: {error}", err=True)


def _ended(records: Iterable[KeyRecord]) -> Iterator[str]:
    now = time.time()
    return (record.id for record in records if record.state(now) != "active")


def _fleet(path: Path) -> FleetFile | None:
    """The file that the fleet was started with last."""
    if not path.exists():
        return None
    with contextlib.suppress(ConfigError):  # of another version, perhaps
        return load_fleet(path, check_sources=False)
    return None


def _key_records(path: Path) -> dict[str, KeyRecord]:
    if not path.exists():
        return {}
    try:
        with KeyStore(path) as store:
            return {record.id: record for record in store.records()}
    except StoreUnusable as error:
        fail(str(error), EXIT_FAILED)
