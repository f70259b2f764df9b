"""`pagefleet plan`: does the fleet fit into this machine's memory?"""

from __future__ import annotations

import sys

import click
from rich.table import Table
from rich.text import Text

from contracts.units import format_bytes, parse_bytes
from gateway.cli.common import fail, print_json, read_fleet
from gateway.cli.display import make_console
from gateway.fleet.errors import FleetError
from gateway.fleet.ledger import Ledger, make_ledger, this_machine

_PARTS = ("weights", "activations", "kv_cache", "graphs", "context")


def _size(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("file")
@click.option(
    "--card-memory",
    callback=_size,
    metavar="SIZE",
    help="Plan for cards of this size, such as 24GiB; one where nvidia-smi sees none.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout; sizes in bytes.")
def plan(file: str, card_memory: int | None, as_json: bool) -> None:
    """Print what each worker takes, per card and in the host's memory; nothing is started or downloaded.

    Exit codes: 0 it fits, 1 a model's size is unknown, 2 a model or its options can't be
    served, 5 it doesn't fit.
    """
    fleet = read_fleet(file)
    try:
        ledger = make_ledger(fleet, this_machine(card_memory))
    except FleetError as error:
        fail(str(error), error.exit_code)
    if as_json:
        print_json({"fits": not ledger.problems and not ledger.unknown, "ledger": ledger})
    else:
        _show(ledger)
    sys.exit(ledger.exit_code)


def _show(ledger: Ledger) -> None:
    console = make_console()
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "on", *(part.replace("_", " ") for part in _PARTS), "sum", "budget", "swap by"):
        table.add_column(title, justify="left" if title in ("worker", "on", "swap by") else "right")
    for worker in ledger.workers:
        parts = worker.estimate
        sizes = [format_bytes(getattr(parts, name)) if parts else "?" for name in _PARTS]
        total = format_bytes(worker.total) if worker.total is not None else "?"
        budget = format_bytes(parts.budget) if parts and parts.budget is not None else "-"
        cells = (worker.slot, worker.place, *sizes, total, budget, worker.swap or "-")
        table.add_row(*map(Text, cells))
    console.print(table)
    for place in ledger.places:
        taken = f"{format_bytes(place.taken)} of {format_bytes(place.total)} taken"
        click.echo(f"{place.name}: {taken}, {format_bytes(max(0, place.left))} left")
    for worker in ledger.workers:
        if worker.unknown:
            click.echo(f"unknown: {worker.unknown}", err=True)
    for refusal in ledger.refusals:
        click.echo(refusal, err=True)
