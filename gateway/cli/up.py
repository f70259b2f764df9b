"""`pagefleet up`: the supervisor, in the foreground or detached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import click

from contracts.notify import Notifier
from gateway.cli.common import Silent, ask_if_it_answers, fail, print_json, read_fleet
from gateway.cli.display import SETTLED, Display
from gateway.cli.reconfigure import change_instead
from gateway.config import FleetFile
from gateway.fleet.admin import FleetStatus
from gateway.fleet.commands import PYTHON, Commands, slots_of
from gateway.fleet.errors import EXIT_CONFLICT, EXIT_DEGRADED, EXIT_INVALID, FleetError
from gateway.fleet.hosting import hosting_of
from gateway.fleet.logs import open_log, tail
from gateway.fleet.statedir import SUPERVISOR_LOG, StateDir
from gateway.fleet.supervisor import Supervisor

OWN_COMMAND = (*PYTHON, "gateway.cli")


@click.command()
@click.argument("file")
@click.option("-d", "--detach", is_flag=True, help="Return when every model is ready; the fleet goes on.")
@click.option("--dry-run", is_flag=True, help="Check the file and print the command lines; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line on stdout.")
@click.option("--detached", is_flag=True, hidden=True, help="This is the supervisor that --detach started.")
def up(file: str, detach: bool, dry_run: bool, as_json: bool, detached: bool) -> None:
    """Start a fleet: supervisor, gateway and one worker per model replica.

    Stays in the foreground; Ctrl-C or SIGTERM stops it after requests in flight have ended,
    a second one at once. Where the fleet is up already, what the file says anew is applied to
    it, as by `pagefleet config apply`, unless that takes a model away.
    """
    fleet = read_fleet(file, "; nothing was started")
    for warning in fleet.warnings():
        click.echo(f"warning: {warning}", err=True)
    state = StateDir(fleet.supervisor.state_dir)
    if dry_run:
        _print_commands(fleet, as_json)
    elif not detached and (running := _running(state)) is not None:
        sys.exit(change_instead(state, running, fleet, file, as_json))
    elif detach:
        _run_detached(fleet, file, as_json)
    else:
        sys.exit(_run(fleet, as_json, detached))


def _running(state: StateDir) -> FleetStatus | None:
    """The fleet that is up in the state directory; the command ends where its supervisor doesn't say."""
    try:
        return ask_if_it_answers(state, "GET", "/status")
    except Silent as error:
        fail(f"a fleet is already up; {error}", EXIT_CONFLICT)


def _run(fleet: FleetFile, as_json: bool, detached: bool) -> int:
    display = Display(fleet, lambda: supervisor.url, as_json=as_json, detached=detached)
    supervisor = Supervisor(fleet, on_change=display, notifier=Notifier.from_environment())
    try:
        with supervisor.open():
            if supervisor.reaped:
                click.echo(
                    f"ended {supervisor.reaped} processes that a crashed supervisor had left", err=True
                )
            return asyncio.run(supervisor.run())
    except FleetError as error:
        fail(str(error), error.exit_code)
    finally:
        display.close()


def _print_commands(fleet: FleetFile, as_json: bool) -> None:
    state = StateDir(fleet.supervisor.state_dir)
    commands = Commands(hosting_of(fleet, state).parent, fleet)
    argvs = {
        slot.name: commands.worker(slot, 1, state.run / f"{slot.name}.1.sock") for slot in slots_of(fleet)
    }
    if as_json:
        print_json(argvs)
    else:
        click.echo("\n".join(shlex.join(argv) for argv in argvs.values()))


def _run_detached(fleet: FleetFile, file: str, as_json: bool) -> None:
    state = StateDir(fleet.supervisor.state_dir)
    try:
        state.make()
    except FleetError as error:
        fail(str(error), error.exit_code)
    log = state.log(SUPERVISOR_LOG)
    start = log.stat().st_size if log.exists() else 0
    output = open_log(log)
    process = subprocess.Popen(
        [*OWN_COMMAND, "up", "--detached", file],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    os.close(output)
    sys.exit(_follow_start(fleet, state, process, log, start, as_json))


def _follow_start(
    fleet: FleetFile, state: StateDir, process: subprocess.Popen[bytes], log: Path, start: int, as_json: bool
) -> int:
    """Shows the start of a detached supervisor until every unit is ready or has failed."""
    url = ""
    display = Display(fleet, lambda: url, as_json=as_json, detached=True)
    try:
        while process.poll() is None:
            status = None
            with contextlib.suppress(Silent):  # a predecessor that hangs; the new one says so itself
                status = ask_if_it_answers(state, "GET", "/status")
            if status is not None and status.supervisor == process.pid:
                url = status.url
                for unit in status.units:
                    display(unit)
                states = {unit.state for unit in status.units}
                if states <= SETTLED:
                    return 0 if states == {"ready"} else EXIT_DEGRADED
            time.sleep(0.2)
    finally:
        display.close()
    click.echo("\n".join(tail(log, 30, start)), err=True)
    if process.returncode == EXIT_INVALID:
        with contextlib.suppress(FleetError):  # somebody else may have it by now
            state.acquire()
            state.discard()
            state.release()
    return process.returncode or 1
