"""`pagefleet keys`: who may use the fleet. A command that ends a key returns when every gateway knows it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, get_args

import click
import msgspec
from rich.table import Table
from rich.text import Text

from contracts.units import parse_duration
from gateway.cli.common import count_of, fail, print_json, warn_about_models, which_fleet
from gateway.cli.display import make_console
from gateway.cli.known_limits import forget_ended_keys
from gateway.fleet.errors import EXIT_FAILED, EXIT_INVALID, InvalidFleet
from gateway.fleet.statedir import StateDir
from gateway.identity.errors import KeyRefused, StoreUnusable, utc
from gateway.identity.identity import MAX_COUNT, MAX_QPS, MIN_QPS, KeyLimits, Priority
from gateway.identity.keyring import POLL_EVERY
from gateway.identity.record import KeyRecord
from gateway.identity.secret import id_of
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.limits.overrides import FILE, OverridesFile, OverridesUnusable, subject

_STYLES = {"active": "green", "expired": "dim", "revoked": "red"}


def _duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Unix time of a duration from now, or of a date."""
    if value is None:
        return None
    if not value.isdigit():  # 20270131 is no number of seconds
        with contextlib.suppress(ValueError):
            return time.time() + parse_duration(value)
        with contextlib.suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise click.BadParameter(
        f"{value!r} is no time; write a duration such as 90d, or a date such as 2027-01-31 (UTC)"
    )


def _key_id(ctx: click.Context, param: click.Parameter, value: str) -> str:
    key_id = id_of(value)
    if key_id is None:  # it may be a part of a key, so it isn't repeated
        raise click.BadParameter("this is no id of a key; `pagefleet keys list` shows them")
    return key_id


def _key_ids(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_key_id(ctx, param, value) for value in values)


@click.group()
def keys() -> None:
    """Create, list, rotate and revoke API keys.

    A key is shown once, when it is made; only its hash is stored. KEY is its id, or the key itself.
    """


@keys.command()
@which_fleet("-f", "--file")
@click.option("--user", required=True, help="Whose key it is; limits and usage count for this name.")
@click.option("--name", default="", help="What the key is for.")
@click.option("--model", "models", multiple=True, help="A model it may use; may be repeated.  [default: all]")
@click.option("--priority", type=click.Choice(get_args(Priority)), default="normal", show_default=True)
@click.option("--qps", type=click.FloatRange(MIN_QPS, MAX_QPS), help="Requests per second.")
@click.option("--burst", type=click.IntRange(1, MAX_COUNT), help="Requests at once.")
@click.option("--concurrency", type=click.IntRange(1, MAX_COUNT), help="Requests in flight.")
@click.option(
    "--tokens-per-minute", type=click.IntRange(1, MAX_COUNT), help="Tokens of prompts and answers per minute."
)
@click.option("--expires", callback=_moment, metavar="WHEN", help="90d, or a date (UTC).  [default: never]")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def create(
    state: StateDir,
    user: str,
    name: str,
    models: tuple[str, ...],
    priority: Priority,
    qps: float | None,
    burst: int | None,
    concurrency: int | None,
    tokens_per_minute: int | None,
    expires: float | None,
    as_json: bool,
) -> None:
    """Make a key and print it, once; all else goes to stderr."""
    limits = KeyLimits(qps, burst, concurrency, tokens_per_minute)
    warn_about_models(state, models)
    with _store(state, create=True) as store:
        record, key = store.create(
            user, name=name, models=models or None, priority=priority, limits=limits, expires=expires
        )
    if as_json:
        print_json({**_shown(record), "key": key})
        return
    click.echo(key)
    click.echo(
        f"key {record.id} of {record.user} in {state.root}, {_end(record)}; it is not shown again", err=True
    )


@keys.command("list")
@which_fleet("-f", "--file")
@click.option("-a", "--all", "everything", is_flag=True, help="Also revoked and expired keys.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_keys(state: StateDir, everything: bool, as_json: bool) -> None:
    """List keys, oldest first."""
    now = time.time()
    records: list[KeyRecord] = []
    if (state.root / KEYS_FILE).exists():
        with _store(state) as store:
            records = store.records()
    shown = [record for record in records if everything or record.state(now) == "active"]
    if as_json:
        print_json([_shown(record) for record in shown])
        return
    if shown:
        make_console().print(_table(shown, now))
    elif records:
        click.echo(f"no active key; --all shows {count_of(len(records), 'other one')}")
    else:
        click.echo(f"no keys in {state.root}; `pagefleet keys create --user NAME` makes one")


@keys.command()
@click.argument("key", callback=_key_id)
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def show(state: StateDir, key: str, as_json: bool) -> None:
    """Show one key: all but its secret, which nobody has."""
    with _store(state) as store:
        record = store.get(key)
    if as_json:
        print_json(_shown(record))
        return
    for field, value in _shown(record).items():
        if field in ("created", "expires", "revoked") and value is not None:
            value = utc(value)
        elif field == "limits":
            value = _limits(record.limits)
        elif field == "models":
            value = _models(record)
        click.echo(f"{field:<13} {'-' if value in (None, '') else value}")


@keys.command()
@click.argument("key", callback=_key_id)
@which_fleet("-f", "--file")
@click.option(
    "--grace",
    callback=_duration,
    metavar="DURATION",
    default="24h",
    show_default=True,
    help="How long the old key goes on; 0s ends it now.",
)
@click.option(
    "--expires",
    callback=_moment,
    metavar="WHEN",
    help="Of the new key.  [default: it lives as long as the old one]",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def rotate(state: StateDir, key: str, grace: float, expires: float | None, as_json: bool) -> None:
    """Replace a key by a new one with the same rights and limits, and print that, once."""

    def take_limits(new_id: str) -> None:
        """Those that were set while running are kept by the key's id."""
        limits = OverridesFile(state.root / FILE)
        entry = limits.read().get(subject("key", key))
        if entry is not None and entry.bounds:
            limits.put(subject("key", new_id), entry.bounds)

    with _store(state) as store:
        old, new, secret = store.rotate(key, grace=grace, expires=expires, prepare=take_limits)
        forget_ended_keys(state, store.records())
    _until_seen()
    if as_json:
        print_json({**_shown(new), "key": secret, "old": _shown(old)})
        return
    click.echo(secret)
    click.echo(f"key {new.id} of {new.user}, {_end(new)}; it is not shown again", err=True)
    click.echo(f"the old key {old.id}: {_end(old)}", err=True)


@keys.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, callback=_key_ids)
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def revoke(state: StateDir, keys: tuple[str, ...], as_json: bool) -> None:
    """End keys for good: all of them, or none when one isn't there. A key revoked before is no error."""
    with _store(state) as store:
        records = store.revoke(keys)
        forget_ended_keys(state, store.records())
    _until_seen()
    if as_json:
        print_json([_shown(record) for record in records])
        return
    for record in records:
        click.echo(f"key {record.id} of {record.user}: {_end(record)}")


def _until_seen() -> None:
    """For a request that comes later, every gateway looks at the file as it is now."""
    time.sleep(POLL_EVERY)


@contextlib.contextmanager
def _store(state: StateDir, create: bool = False) -> Iterator[KeyStore]:
    """The fleet's keys, or the end of the command: code 2 for what can't be asked for, 1 for a file that
    can't be used."""
    path = state.root / KEYS_FILE
    try:
        if create:
            state.make()
        elif not path.exists():
            raise KeyRefused(f"there are no keys in {state.root}; --state-dir names another fleet")
        with KeyStore(path, create=create, write=True) as store:
            yield store
    except (KeyRefused, InvalidFleet) as error:
        state.discard()
        fail(str(error), EXIT_INVALID)
    except (StoreUnusable, OverridesUnusable) as error:
        fail(str(error), EXIT_FAILED)


def _shown(record: KeyRecord) -> dict[str, Any]:
    """A key as JSON: `models` null for all, times in Unix seconds."""
    return {**msgspec.to_builtins(record), "state": record.state(time.time())}


def _end(record: KeyRecord) -> str:
    if record.revoked is not None:
        return f"revoked at {utc(record.revoked)}"
    if record.expires is None:
        return "never expires"
    return f"{'expired' if record.state(time.time()) == 'expired' else 'expires'} at {utc(record.expires)}"


def _limits(limits: KeyLimits) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in msgspec.to_builtins(limits).items()) or "-"


def _models(record: KeyRecord) -> str:
    return "all" if record.models is None else ", ".join(record.models)


def _table(records: list[KeyRecord], now: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("ID", "USER", "NAME", "MODELS", "PRIORITY", "LIMITS", "CREATED", "EXPIRES", "STATE"):
        table.add_column(column)
    for record in records:
        state = record.state(now)
        table.add_row(
            record.id,
            Text(record.user),
            Text(record.name),
            Text(_models(record)),
            record.priority,
            Text(_limits(record.limits)),
            utc(record.created),
            "never" if record.expires is None else utc(record.expires),
            Text(state, style=_STYLES[state]),
        )
    return table
