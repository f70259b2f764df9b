"""`pagefleet down`"""

from __future__ import annotations

import time

import click

from contracts.units import format_duration
from gateway.cli.common import (
    EXIT_STILL_RUNNING,
    DurationParam,
    Silent,
    ask_if_it_answers,
    fail,
    print_json,
    which_fleet,
)
from gateway.fleet.backends.systemd import end_units
from gateway.fleet.errors import Conflict, FleetError
from gateway.fleet.reaper import reap
from gateway.fleet.statedir import StateDir


@click.command()
@which_fleet("-f", "--file")
@click.option("--quick", is_flag=True, help="Don't wait for requests in flight.")
@click.option(
    "--timeout", type=DurationParam(), default=120.0, help="How long to wait for the end.  [default: 2m]"
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def down(state: StateDir, quick: bool, timeout: float, as_json: bool) -> None:
    """Stop the fleet: requests in flight end first. Not an error when none is up."""
    try:
        status, silent = ask_if_it_answers(state, "POST", f"/stop?quick={int(quick)}"), False
    except Silent as error:
        status, silent = None, True
        click.echo(f"pagefleet: {error}", err=True)
    was_up = status is not None or silent or state.systemd.exists()  # units go on without their supervisor
    deadline = time.monotonic() + timeout
    while not _ended(state):
        if time.monotonic() > deadline:
            pid = (status.supervisor if status else state.holder) or "unknown"
            way_out = f"; where nothing else helps, `kill -9 {pid}` and `down` again end it" if silent else ""
            fail(
                f"still stopping after {format_duration(timeout)} (supervisor is process {pid}){way_out}",
                EXIT_STILL_RUNNING,
            )
        time.sleep(0.1)
    if as_json:
        print_json({"was_up": was_up, "state_dir": str(state.root)})
    else:
        click.echo("stopped" if was_up else f"no fleet was up in {state.root}")


def _ended(state: StateDir) -> bool:
    """True when no supervisor has the state directory; what a crashed one left is ended too."""
    if not state.root.exists():
        return True
    try:
        state.acquire()
    except Conflict:
        return False
    except FleetError as error:
        fail(str(error), error.exit_code)
    try:
        reap(state.records)
        end_units(state)
        state.remove_sockets()
    except FleetError as error:
        fail(str(error), error.exit_code)
    finally:
        state.release()
    return True
