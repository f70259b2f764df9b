"""`pagefleet limits`: see, set and unset limits. Running gateways apply a change within a quarter second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from msgspec import UNSET
from rich.table import Table
from rich.text import Text

from gateway.cli.common import fail, print_json, which_fleet
from gateway.cli.display import make_console
from gateway.config import ConfigError, FleetFile, load_fleet
from gateway.fleet.errors import EXIT_FAILED, EXIT_INVALID, InvalidFleet, no_such_model
from gateway.fleet.statedir import StateDir
from gateway.identity.errors import KeyRefused, StoreUnusable
from gateway.identity.identity import NO_LIMITS, KeyLimits
from gateway.identity.record import KeyRecord, checked_user
from gateway.identity.secret import id_of
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.limits.bounds import FIELDS, NONE, Bounds, bounds_of
from gateway.limits.overrides import DEFAULT, FILE, KINDS, Entry, OverridesFile, OverridesUnusable, subject
from gateway.limits.table import LimitTable

_NO_SETTINGS = KeyLimits()  # a fleet file that is not known says nothing


class Subject(NamedTuple):
    """Whose limits: `kind` of KINDS, and a name unless it is the default."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


class _Number(click.ParamType[Any]):
    """A positive number, or "none"."""

    def __init__(self, number: type[int] | type[float]) -> None:
        self.name = "NUMBER|none"
        self._number = number

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == NONE:
            return NONE
        try:
            number = self._number(value)
        except (TypeError, ValueError):
            kind = "whole number" if self._number is int else "number"
            self.fail(f"{value!r} is no {kind}; write one, or none for no such limit", param, ctx)
        return number


_OPTIONS: dict[str, tuple[type[int] | type[float], str]] = {
    "qps": (float, "Requests per second."),
    "burst": (int, "Requests at once; goes with qps.  [default: what a second allows]"),
    "concurrency": (int, "Requests in flight."),
    "tokens_per_minute": (int, "Tokens of prompts and answers per minute."),
}


def _numbers(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(FIELDS):
        number, text = _OPTIONS[name]
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, type=_Number(number), help=text)(command)
    return command


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(FIELDS):
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, is_flag=True, help=f"Only {name}.")(command)
    return command


@click.group()
def limits() -> None:
    """See, set and take away limits: of a user, a key, a model, or the default of all users.

    What is set here is over what the fleet file says, and stays until it is unset. It holds on every gateway
    of the fleet: within a quarter second on this machine's, and on others' through Redis.
    """


@limits.command()
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.argument("name", required=False)
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def get(state: StateDir, kind: str | None, name: str | None, as_json: bool) -> None:
    """Show limits: of one user, key or model, the default, or all there are."""
    known = _Known(state)
    if kind is not None:
        subjects = [known.subject(kind, name)]
    else:
        subjects = list(known.subjects())
    if as_json:
        rows = [known.shown(one) for one in subjects]
        print_json(rows if kind is None else rows[0])
    elif kind is None:
        make_console().print(_table(known, subjects))
    else:
        click.echo(f"{subjects[0]}: {known.effective(subjects[0])}")
    if not known.has_file and not as_json:
        click.echo("the fleet file's own limits show once the fleet has been up", err=True)


@limits.command("set")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name", required=False)
@which_fleet("-f", "--file")
@_numbers
@click.option("--dry-run", is_flag=True, help="Only say what would hold.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def set_limits(
    state: StateDir, kind: str, name: str | None, dry_run: bool, as_json: bool, **numbers: Any
) -> None:
    """Set limits; those that aren't named stay. `none` takes away a limit of the layer below."""
    given: dict[str, Any] = {
        field: None if value == NONE else value for field, value in numbers.items() if value is not None
    }
    if not given:
        fail("what limit? give --qps, --burst, --concurrency or --tokens-per-minute", EXIT_INVALID)
    known = _Known(state)
    whose = known.subject(kind, name)
    before = known.set_for(whose)
    bounds = msgspec.structs.replace(before, **given)
    if "qps" in given and "burst" not in given:
        bounds = msgspec.structs.replace(bounds, burst=UNSET)  # it was the old rate's
    _check(bounds)
    _change(state, known, whose, bounds, dry_run, as_json)


@limits.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name", required=False)
@which_fleet("-f", "--file")
@_flags
@click.option("--dry-run", is_flag=True, help="Only say what would hold.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def unset(state: StateDir, kind: str, name: str | None, dry_run: bool, as_json: bool, **fields: bool) -> None:
    """Take away what was set, all of it or the named limits; the fleet file's hold again.

    With --qps the burst goes too: it was that rate's.
    """
    known = _Known(state)
    whose = known.subject(kind, name)
    named = [field for field, chosen in fields.items() if chosen] or list(FIELDS)
    if "qps" in named:
        named.append("burst")
    bounds = msgspec.structs.replace(known.set_for(whose), **dict.fromkeys(named, UNSET))
    _change(state, known, whose, bounds, dry_run, as_json)


def _check(bounds: Bounds) -> None:
    try:
        bounds.check()
    except ValueError as error:
        fail(str(error), EXIT_INVALID)


def _change(
    state: StateDir, known: _Known, whose: Subject, bounds: Bounds, dry_run: bool, as_json: bool
) -> None:
    before = known.effective(whose)
    key = subject(*whose)
    if dry_run:
        entries = known.entries
        known.use({**entries, key: Entry(entries[key].at + 1 if key in entries else 0, bounds)})
    else:
        try:
            state.make()
            known.use(OverridesFile(state.root / FILE).put(key, bounds))
        except InvalidFleet as error:
            fail(str(error), EXIT_INVALID)
        except OverridesUnusable as error:
            fail(str(error))
    if as_json:
        print_json({**known.shown(whose), "dry_run": dry_run})
        return
    would = "would be" if dry_run else "now"
    click.echo(f"{whose}: {would} {known.effective(whose)} (before: {before})")


class _Known:
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
            if record.limits != NO_LIMITS and record.state(time.time()) == "active":
                found.add(Subject("key", record.id))
        for key, entry in self.entries.items():
            kind, _, name = key.partition(":")
            if entry.bounds and kind != DEFAULT:
                found.add(Subject(kind, name))
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


def _table(known: _Known, subjects: list[Subject]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("OF", "NAME", "QPS", "BURST", "CONCURRENCY", "TOKENS/MIN", "SET WHILE RUNNING"):
        table.add_column(column)
    for whose in subjects:
        holds = known.effective(whose)
        values = [
            "-" if (value := getattr(holds, name)) is UNSET or value is None else f"{value:.12g}"
            for name in FIELDS
        ]
        table.add_row(whose.kind, Text(whose.name or "(all users)"), *values, str(known.set_for(whose)))
    return table
