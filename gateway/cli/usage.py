"""`pagefleet usage`: what users, keys and models took."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Any, get_args

import click
from rich.table import Table
from rich.text import Text

from contracts.units import parse_duration
from gateway.cli.common import fail, print_json, printable, warn_about_models, which_fleet
from gateway.cli.display import make_console
from gateway.fleet.statedir import StateDir
from gateway.usage.store import COUNTS, USAGE_FILE, Group, Total, UsageStore, UsageUnusable


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Unix time of a duration before now, or of a date."""
    if value is None:
        return None
    if not value.isdigit():
        with contextlib.suppress(ValueError):
            return time.time() - parse_duration(value)
        with contextlib.suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise click.BadParameter(
        f"{value!r} is no time; write a duration such as 7d (before now), or a date such as 2027-01-31 (UTC)"
    )


@click.command()
@which_fleet("-f", "--file")
@click.option("--user", help="Of this user only.")
@click.option("--key", help="Of the key with this id only.")
@click.option("--model", help="Of this model only.")
@click.option("--since", callback=_moment, metavar="WHEN", help="7d, or a date (UTC); whole hours count.")
@click.option("--until", callback=_moment, metavar="WHEN", help="The same, for the end.")
@click.option(
    "--by",
    "groups",
    multiple=True,
    type=click.Choice(get_args(Group)),
    help="Sums by what; may be repeated.  [default: user, model]",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def usage(
    state: StateDir,
    user: str | None,
    key: str | None,
    model: str | None,
    since: float | None,
    until: float | None,
    groups: tuple[Group, ...],
    as_json: bool,
) -> None:
    """Show requests and tokens by user and model, or by key, hour or day; also of a fleet that is down.

    Hours and days are those of UTC.
    """
    groups = tuple(dict.fromkeys(groups)) or ("user", "model")
    path = state.root / USAGE_FILE
    if not path.exists():
        fail(
            f"nothing has been used yet in {state.root}, or gateway.usage is off there; --file or "
            "--state-dir names another fleet"
        )
    store = UsageStore(path)
    try:
        totals = store.totals(groups, since=since, until=until, user=user, key=key, model=model)
    except UsageUnusable as error:
        fail(str(error))
    finally:
        store.close()
    if model is not None and not totals:
        warn_about_models(state, [model])
    if as_json:
        print_json([_as_json(groups, total) for total in totals])
    else:
        make_console().print(_table(groups, totals))


def _as_json(groups: tuple[Group, ...], total: Total) -> dict[str, Any]:
    counts = dict(zip(COUNTS, total[1:], strict=True))
    return {**dict(zip(groups, total.group, strict=True)), **counts}


def _table(groups: tuple[Group, ...], totals: list[Total]) -> Table:
    sums = [sum(column) for column in zip(*(total[1:] for total in totals), strict=True)] or [0] * len(COUNTS)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    for place, group in enumerate(groups):
        table.add_column(group.upper(), footer="all" if place == 0 else "")
    for name, whole in zip(COUNTS, sums, strict=True):
        table.add_column(name.replace("_", " ").upper(), footer=f"{whole:,}", justify="right")
    for total in totals:
        names = [Text(printable(name) or "-") for name in total.group]
        table.add_row(*names, *(f"{count:,}" for count in total[1:]))
    return table
