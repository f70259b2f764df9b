"""How a start looks: a live line per process on a terminal, else one line per transition, or JSON lines."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gateway.cli.common import DEFAULT_STATE_DIR
from gateway.config import FleetFile
from gateway.fleet.unit import UnitState, UnitStatus

STYLES: dict[UnitState, str] = {
    "waiting": "dim",
    "starting": "yellow",
    "ready": "green",
    "draining": "yellow",
    "backoff": "magenta",
    "failed": "bold red",
    "stopping": "yellow",
    "stopped": "dim",
}


SETTLED = {"ready", "draining", "failed"}  # not on their way to anything


def make_console() -> Console:
    """stdout; without an edge where it isn't a terminal, so that no line is broken for who reads it."""
    return Console() if sys.stdout.isatty() else Console(width=10_000)


def can_be_live(console: Console) -> bool:
    """Whether what is shown can be replaced by what comes after it; a dumb terminal takes lines alone."""
    return console.is_terminal and not console.is_dumb_terminal


class Display:
    """Shows statuses as they come; call it with each. `url` is asked when the fleet is up."""

    def __init__(
        self, fleet: FleetFile, url: Callable[[], str], *, as_json: bool = False, detached: bool = False
    ) -> None:
        self._fleet = fleet
        self._url = url
        self._json = as_json
        self._stop_hint = f"`{command(fleet, 'down')}` stops it." if detached else "Ctrl-C stops it."
        self._latest: dict[str, UnitStatus] = {}
        self._announced = False
        self._console = make_console()
        self._live: Live | None = None
        if can_be_live(self._console) and not as_json:
            self._live = Live(
                console=self._console, auto_refresh=False
            )  # no thread beside the one that forks

    def __call__(self, status: UnitStatus) -> None:
        before = self._latest.get(status.slot)
        self._latest[status.slot] = status
        transition = before is None or (before.state, before.phase) != (status.state, status.phase)
        if self._json:
            self._show_json(status)
        elif self._live is not None and not self._announced:
            self._show_live()
        elif transition and status.state != "waiting":
            click.echo(describe(status))
        if status.state in ("failed", "backoff") and (before is None or before.state != status.state):
            self._explain(status)
        self._announce()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _show_json(self, status: UnitStatus) -> None:
        click.echo(msgspec.json.encode({"event": "status", **msgspec.structs.asdict(status)}).decode())

    def _show_live(self) -> None:
        assert self._live is not None
        if not self._live.is_started:
            self._live.start()
        self._live.update(Group(unit_table(list(self._latest.values()))), refresh=True)

    def _explain(self, status: UnitStatus) -> None:
        """Why it failed, with the process's own last words."""
        if self._json:
            return
        lines = [f"{status.slot}: {status.error}", *(f"  | {line}" for line in status.log_tail)]
        text = "\n".join([*lines, f"  whole log: {status.log}"])
        if self._live is not None and self._live.is_started:
            self._console.print(Text(text))
        else:
            click.echo(text, err=True)

    def _announce(self) -> None:
        """Says once that the fleet is up: when nothing is on its way any more and something can be used."""
        expected = self._fleet.gateway.processes + sum(entry.replicas for entry in self._fleet.models)
        states = [status.state for status in self._latest.values()]
        if self._announced or len(states) < expected or not set(states) <= SETTLED:
            return
        self._announced = True
        self.close()
        failed = [status.slot for status in self._latest.values() if status.state == "failed"]
        usable = {status.role for status in self._latest.values() if status.state != "failed"}
        if usable != {"gateway", "worker"}:
            return
        if self._json:
            click.echo(json.dumps({"event": "up", "url": self._url(), "failed": failed}))
            return
        click.echo(banner(self._fleet, self._url(), failed, self._stop_hint))
        sys.stdout.flush()


def banner(fleet: FleetFile, url: str, failed: list[str], stop_hint: str) -> str:
    """What a person needs next: the address, a command to paste, who may call."""
    models = ", ".join(
        entry.name + (f" ({', '.join(entry.aliases)})" if entry.aliases else "") for entry in fleet.models
    )
    body = json.dumps(
        {
            "model": fleet.models[0].name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 64,
            "temperature": 0,
        }
    )
    auth = fleet.gateway.auth
    needs_key = auth.mode != "none"
    who = {
        "none": "none; whoever reaches this address may use it",
        "keys": "API keys",
        "oidc": f"tokens of {auth.issuer}, and API keys",
    }[auth.mode]
    make_key = f"export PAGEFLEET_API_KEY=$({command(fleet, 'keys', 'create', '--user', 'me')})"
    key_header = ' -H "authorization: Bearer $PAGEFLEET_API_KEY"' if needs_key else ""
    curl = f"curl {url}/v1/chat/completions{key_header} -H 'content-type: application/json'"
    lines = [
        "",
        f"pagefleet is up at {url}" + (f", without {', '.join(failed)}" if failed else ""),
        f"models: {models}",
        f"authentication: {who}",
        "",
        "try:",
        *([f"  {make_key}"] if needs_key else []),
        f"  {curl} -d {shlex.quote(body)}",
        f"  {command(fleet, 'chat', fleet.models[0].name)}",
        "",
        stop_hint,
    ]
    return "\n".join(lines)


def command(fleet: FleetFile, *arguments: str) -> str:
    """What to type for a command to this fleet: with the directory that holds its state, unless a command
    that names none finds it."""
    state_dir = fleet.supervisor.state_dir
    named = [] if state_dir == Path(DEFAULT_STATE_DIR) else ["--state-dir", str(state_dir.absolute())]
    return f"{_program()} {shlex.join([*arguments, *named])}"


def _program() -> str:
    """What to type to run this command again, also when its environment isn't activated."""
    started_as = Path(sys.argv[0])
    if shutil.which("pagefleet") or started_as.name != "pagefleet":
        return "pagefleet"
    return shlex.quote(str(started_as))


def describe(status: UnitStatus) -> str:
    """One line for one transition."""
    clock = time.strftime("%H:%M:%S")
    process = f" (process {status.pid})" if status.pid is not None and status.phase == "starting" else ""
    if status.state == "backoff":
        wait = max(0.0, (status.retry_at or 0) - time.time())
        return f"{clock} {status.slot}: down, starts again in {wait:.1f} s"
    phase = f": {status.phase}" if status.phase not in ("", status.state) else ""
    return f"{clock} {status.slot}: {status.state}{phase}{process}"


class Start(Protocol):
    """What is known of a process by whose phase and progress a start is shown."""

    @property
    def state(self) -> UnitState: ...
    @property
    def phase(self) -> str: ...
    @property
    def done(self) -> float: ...
    @property
    def total(self) -> float: ...


def start_share(start: Start) -> int | None:
    """Percent of the phase that is done; None where its end isn't known."""
    if start.state != "starting" or start.total <= 1:  # a phase of one step says nothing on its way
        return None
    return int(100 * min(start.done / start.total, 1))


def start_words(start: Start, every: int = 1) -> str:
    """``weights 45%``: the phase of a start and how far it is, in steps of `every` percent; the state of what
    isn't there yet."""
    share = start_share(start)
    return (start.phase or start.state) + (f" {share // every * every}%" if share is not None else "")


def unit_table(units: Sequence[UnitStatus]) -> Table:
    """A row per process, with a bar while it loads."""
    table = Table.grid(padding=(0, 2))
    for unit in units:
        bar: ProgressBar | Text = Text("")
        if start_share(unit) is not None:
            bar = ProgressBar(total=unit.total, completed=min(unit.done, unit.total), width=30)
        phase = unit.phase if unit.phase != unit.state else ""
        table.add_row(Text(unit.slot), Text(unit.state, style=STYLES[unit.state]), Text(phase), bar)
    return table
