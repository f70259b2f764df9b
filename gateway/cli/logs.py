"""`pagefleet logs`"""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from contracts.suggest import did_you_mean
from gateway.cli.common import fail, fleet_names, which_fleet
from gateway.fleet.backends.systemd import read_mark
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.logs import tail
from gateway.fleet.state import read_routes
from gateway.fleet.statedir import SUPERVISOR_LOG, StateDir


@click.command()
@click.argument("name")
@which_fleet("--file")
@click.option("-f", "--follow", "follow", is_flag=True, help="Go on as lines come.")
@click.option(
    "-n", "--lines", default=100, show_default=True, type=click.IntRange(min=0), help="Lines to begin with."
)
def logs(name: str, state: StateDir, follow: bool, lines: int) -> None:
    """Show the log of a model (by any of its names), a slot, or the gateway; also of a fleet that is down."""
    paths = _find(state, name)
    for path in paths:
        prefix = f"{path.stem} | " if len(paths) > 1 else ""
        for line in tail(path, lines):
            click.echo(prefix + line)
    if follow:
        try:
            _follow(paths)
        except KeyboardInterrupt:
            return


def _find(state: StateDir, name: str) -> list[Path]:
    known = {path.stem: path for path in sorted(state.logs.glob("*.log"))}
    ending = r"\d*" if name == "gateway" else r"-\d+"
    replicas = [path for stem, path in known.items() if re.fullmatch(re.escape(name) + ending, stem)]
    if name in known and name != "gateway":
        return [known[name]]
    of_model = [known[slot] for slot in _slots_of(state, name) if slot in known]
    if of_model or replicas:
        return of_model or replicas
    names = ", ".join(known) or "none"
    hint = _where_it_is(state) if name == SUPERVISOR_LOG else ""
    meant = did_you_mean(name, [*fleet_names(state), *known])
    fail(f"there is no log of '{name}' in {state.logs}{hint}; there are: {names}{meant}", EXIT_INVALID)


def _where_it_is(state: StateDir) -> str:
    mark = read_mark(state)
    if mark is None:
        return "; only a fleet started with --detach has that"
    return f"; systemd's journal has that: journalctl{' --user' if mark.user else ''} -u pagefleet-supervisor"


def _slots_of(state: StateDir, name: str) -> list[str]:
    """The slots of a model that clients know by `name`; its routes outlive the fleet."""
    try:
        routes = read_routes(state.routes).models.values()
    except (OSError, ValueError):
        return []
    return [
        target.slot for model in routes if name in (model.model, *model.aliases) for target in model.targets
    ]


def _follow(paths: list[Path]) -> None:
    offsets = {path: path.stat().st_size for path in paths}
    while True:
        for path in paths:
            size = path.stat().st_size
            start = offsets[path] if size >= offsets[path] else 0  # it has been rotated
            if size > start:
                with open(path, "rb") as file:
                    file.seek(start)
                    piece = file.read(size - start)
                click.echo(piece.decode("utf-8", "replace"), nl=False)
            offsets[path] = size
        time.sleep(0.2)
