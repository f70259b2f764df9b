"""`pagefleet status`"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contracts.units import format_duration
from gateway.cli.change_display import News, summary
from gateway.cli.common import ask_supervisor, print_json, require_fleet, which_fleet
from gateway.cli.display import STYLES, can_be_live, describe, make_console, start_words
from gateway.cli.swap_display import describe_version, log_line
from gateway.cli.top import watch_live
from gateway.config import FleetFile
from gateway.fleet.admin import FleetStatus
from gateway.fleet.errors import EXIT_DEGRADED
from gateway.fleet.rollout import Version
from gateway.fleet.statedir import StateDir
from gateway.fleet.versions import file_version


@click.command()
@which_fleet("-f", "--file")
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Go on until Ctrl-C, with the numbers of `top`; in a pipe, a line for each change.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout; with -w one object per line.")
def status(state: StateDir, watch: bool, as_json: bool) -> None:
    """Show every process of the fleet. Exit code 7 when not all are ready, 1 when no fleet is up."""
    current = require_fleet(state)
    if not watch:
        print_json(current) if as_json else make_console().print(_page(current))
        sys.exit(0 if all(unit.state == "ready" for unit in current.units) else EXIT_DEGRADED)
    try:
        _watch(state, current, as_json)
    except KeyboardInterrupt:
        return


def _watch(state: StateDir, current: FleetStatus | None, as_json: bool) -> None:
    if as_json:
        while current is not None:
            print_json(current)
            time.sleep(1)
            current = ask_supervisor(state, "GET", "/status")
        return
    if current is not None and can_be_live(make_console()):
        watch_live(state, current, 1.0, screen=False)
        return
    said: dict[str, tuple[str, str, int | None]] = {}
    changes = News()
    began = since = time.time()  # of transitions, those before are history
    while current is not None:
        for unit in current.units:
            now = (unit.state, unit.phase, unit.pid)
            if said.get(unit.slot) != now:
                said[unit.slot] = now
                click.echo(describe(unit))
        news = [(entry, rollout) for rollout in current.rollouts for entry in rollout.log if entry.at > since]
        for entry, rollout in sorted(news, key=lambda pair: pair[0].at):
            click.echo(log_line(rollout, entry))
            since = entry.at
        change = current.change
        if change is not None and (change.ended is None or change.ended > began):
            for line in changes.lines(change):
                click.echo(line)
        time.sleep(1)
        current = ask_supervisor(state, "GET", "/status")
    click.echo("the fleet is down")


def _page(status: FleetStatus) -> RenderableType:
    head = f"{status.url}  supervisor {status.supervisor}  up {_age(status.started)}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("SLOT", "MODEL", "STATE", "PHASE", "PID", "GEN", "RESTARTS", "SINCE"):
        table.add_column(column)
    notes: list[Text] = []
    for unit in status.units:
        table.add_row(
            Text(unit.slot),
            Text(unit.model or ""),
            Text(unit.state, style=STYLES[unit.state]),
            Text("" if unit.phase in ("", unit.state) else start_words(unit)),
            str(unit.pid or ""),
            str(unit.generation),
            str(unit.restarts),
            _age(unit.since),
        )
        if unit.error:
            notes.append(Text(f"{unit.slot}: {unit.error}; log: {unit.log}"))
        elif unit.last_exit:
            notes.append(Text(f"{unit.slot}: before its last restart: {unit.last_exit}; log: {unit.log}"))
    notes += map(Text, (*summary(status.change), *_about_versions(status)))
    return Group(Text(head + ("  stopping" if status.stopping else "")), table, *notes)


def _about_versions(status: FleetStatus) -> Iterator[str]:
    """What can't be seen in the processes: rollouts under way, and what they have left."""
    for rollout in status.rollouts:
        if not rollout.terminal:
            new = describe_version(rollout.new, rollout.old)
            share = f", {rollout.standby_bp / 100:g}% of the users on {new}"
            paused = ", paused" if rollout.paused else ""
            yield f"{rollout.model}: rollout {rollout.id} is {rollout.phase}{paused}{share}"
    filed = _filed(status) if status.versions else {}
    for model, version in status.versions.items():
        runs = describe_version(version, filed.get(model))
        yield f"{model}: runs {runs} since a rollout; the fleet file says something else"


def _filed(status: FleetStatus) -> dict[str, Version]:
    """What the fleet file says of the models, as the supervisor keeps it; nothing when it can't be read."""
    try:
        fleet = FleetFile(**json.loads(StateDir(Path(status.state_dir)).config.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return {entry.name: file_version(entry) for entry in fleet.models}


def _age(since: float) -> str:
    """``3.9s`` since a Unix time."""
    return format_duration(round(max(0, time.time() - since), 1))
