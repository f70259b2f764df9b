"""`pagefleet limits`: see, set, unset them. A change holds on every gateway here when the command returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import msgspec
from msgspec import UNSET
from rich.table import Table
from rich.text import Text

from gateway.cli.common import fail, print_json, which_fleet
from gateway.cli.display import make_console
from gateway.cli.known_limits import KnownLimits, Subject
from gateway.fleet.errors import EXIT_INVALID, InvalidFleet
from gateway.fleet.statedir import StateDir
from gateway.limits.bounds import FIELDS, NONE, Bounds
from gateway.limits.live import LOOK_EVERY
from gateway.limits.overrides import FILE, KINDS, Entry, OverridesFile, OverridesUnusable, subject


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
            self.fail(f"{value!r:.40} is no {kind}; write one, or none for no such limit", param, ctx)
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
    of this machine when the command returns, and through Redis on others' within a second.
    """


@limits.command()
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.argument("name", required=False)
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def get(state: StateDir, kind: str | None, name: str | None, as_json: bool) -> None:
    """Show limits: of one user, key or model, the default, or all there are."""
    known = KnownLimits(state)
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
    known = KnownLimits(state)
    whose = known.subject(kind, name)
    known.refuse_ended(whose)
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
    known = KnownLimits(state)
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
    state: StateDir, known: KnownLimits, whose: Subject, bounds: Bounds, dry_run: bool, as_json: bool
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
            known.forget_ended()
            time.sleep(LOOK_EVERY)  # for a request that comes later, every gateway here looks at the file
        except InvalidFleet as error:
            fail(str(error), EXIT_INVALID)
        except OverridesUnusable as error:
            fail(str(error))
    if as_json:
        print_json({**known.shown(whose), "dry_run": dry_run})
        return
    would = "would be" if dry_run else "now"
    click.echo(f"{whose}: {would} {known.effective(whose)} (before: {before})")


def _table(known: KnownLimits, subjects: list[Subject]) -> Table:
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
