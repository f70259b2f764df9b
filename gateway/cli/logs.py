"""`pagefleet logs`"""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from gateway.cli.common import ask_supervisor, fail, which_fleet
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.logs import tail
from gateway.fleet.statedir import StateDir


@click.command()
@click.argument("name")
@which_fleet("--file")
@click.option("-f", "--follow", "follow", is_flag=True, help="Go on as lines come.")
@click.option(
    "-n", "--lines", default=100, show_default=True, type=click.IntRange(min=0), help="Lines to begin with."
)
def logs(name: str, state: StateDir, follow: bool, lines: int) -> None:
    """Show the log of a model, a slot, or the gateway; also of a fleet that is down."""
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
    if name in known:
        return [known[name]]
    replicas = [path for stem, path in known.items() if re.fullmatch(re.escape(name) + r"-\d+", stem)]
    if replicas:
        return replicas
    status = ask_supervisor(state, "GET", "/status")
    of_model = [Path(unit.log) for unit in (status.units if status else ()) if unit.model == name]
    if of_model:
        return of_model
    names = ", ".join(known) or "none"
    fail(f"there is no log of '{name}' in {state.logs}; there are: {names}", EXIT_INVALID)


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
