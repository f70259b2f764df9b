"""`pagefleet top`, and the live page of `pagefleet status -w`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import click
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.common import ask_supervisor, print_json, require_fleet, which_fleet
from gateway.cli.display import can_be_live, make_console
from gateway.cli.page import line, page, rollout_line
from gateway.cli.swap_display import LAST_LINES
from gateway.cli.swap_display import page as rollout_page
from gateway.fleet.admin import FleetStatus
from gateway.fleet.figures import Look, Observatory, Row, rows
from gateway.fleet.rollout import Rollout
from gateway.fleet.statedir import StateDir

WINDOW = 15.0  # seconds that rates and percentiles are of
_LINGERS = 60.0  # seconds that a rollout is shown after its end


@dataclass(frozen=True)
class View:
    """One moment, with the rates since `window` seconds ago; None: it is the first."""

    status: FleetStatus
    look: Look
    rows: list[Row]
    window: float | None

    @property
    def rollouts(self) -> list[Rollout]:
        """Those under way, and those that were until just now."""
        found = self.status.rollouts
        return [one for one in found if one.ended is None or time.time() - one.ended < _LINGERS]


@click.command()
@which_fleet("-f", "--file")
@click.option(
    "-n",
    "--interval",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    help="Seconds between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="One document on stdout, after two looks.")
def top(state: StateDir, interval: float, as_json: bool) -> None:
    """Watch the fleet's processes: weight, load, latency, errors and memory of each.

    Until Ctrl-C; where stdout is no terminal, a line for each process at each look.
    """
    current = require_fleet(state)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            asyncio.run(_print_document(state, current, interval))
        elif can_be_live(make_console()):
            watch_live(state, current, interval, screen=True)
        else:
            asyncio.run(_print_lines(state, current, interval))


def watch_live(state: StateDir, current: FleetStatus, interval: float, *, screen: bool) -> None:
    """The page on a terminal, until Ctrl-C or the fleet is down; `screen`: in place of all that is there."""

    async def watch() -> None:
        with Live(console=console, auto_refresh=False, screen=screen) as live:
            async for view in views(state, current, interval):
                live.update(fitted(view, console), refresh=True)

    console = make_console()
    asyncio.run(watch())
    click.echo("the fleet is down")


def fitted(view: View, console: Console) -> RenderableType:
    """The page; on a low terminal the rollouts' logs make room for what is above and below them."""
    for lines in range(LAST_LINES, 0, -1):
        shown = _render(view, console.width, lines)
        if len(console.render_lines(shown)) <= console.height:
            return shown
    return _render(view, console.width, 0)


def _render(view: View, width: int, lines: int) -> RenderableType:
    rollouts: list[RenderableType] = []
    for rollout in view.rollouts:
        rollouts += [Text(), rollout_page(rollout, lines=lines)]
    return page(
        view.status, view.rows, view.look, width=width, window=view.window, rollouts=[*rollouts, Text()]
    )


async def _print_lines(state: StateDir, current: FleetStatus, interval: float) -> None:
    async for view in views(state, current, interval):
        if view.window is not None:
            for row in view.rows:
                click.echo(line(row))
            for rollout in view.rollouts:
                click.echo(rollout_line(rollout))
    click.echo("the fleet is down")


async def _print_document(state: StateDir, current: FleetStatus, interval: float) -> None:
    async for view in views(state, current, interval):
        if view.window is not None:
            print_json(document(view))
            return


def document(view: View) -> dict[str, object]:
    """What `--json` prints: names as in `figures.Row`; times in seconds, sizes in bytes."""
    return {
        "url": view.status.url,
        "started": view.status.started,
        "stopping": view.status.stopping,
        "epoch": view.status.epoch,
        "window": view.window,
        "processes": [msgspec.structs.asdict(row) for row in view.rows],
        "queued": view.look.queued,
        "rollouts": view.rollouts,
    }


async def views(state: StateDir, current: FleetStatus | None, interval: float) -> AsyncIterator[View]:
    """A look every `interval` seconds while the fleet is up."""
    observatory = Observatory(state)
    looks: deque[Look] = deque()
    try:
        while current is not None:
            looks.append(await observatory.look(current))
            while len(looks) > 2 and looks[-1].at - looks[1].at >= WINDOW:
                looks.popleft()
            before = looks[0] if len(looks) > 1 else None
            window = None if before is None else looks[-1].at - before.at
            yield View(current, looks[-1], rows(current, looks[-1], before), window)
            await asyncio.sleep(interval)
            current = await asyncio.to_thread(ask_supervisor, state, "GET", "/status")
    finally:
        await observatory.aclose()
