"""`pagefleet swap`: replace a model's version while users are on it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.table import Table
from rich.text import Text

from contracts.units import format_bytes, format_duration
from gateway.cli.common import EXIT_STILL_RUNNING, DurationParam, fail, print_json, which_fleet
from gateway.cli.display import make_console
from gateway.cli.swap_client import SwapRefused, Swaps
from gateway.cli.swap_display import Watch, age, describe_version, page, show_option
from gateway.cli.swap_options import StepsParam, refuse_bad, settings_of
from gateway.fleet.driver.asked import Plan, StartRequest, in_words
from gateway.fleet.driver.routes import RolloutStatus
from gateway.fleet.rollout import Options, Record, no_rollout
from gateway.fleet.statedir import StateDir

EXIT_DETACHED = 130
_DEFAULTS = Options()

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def swap() -> None:
    """Replace a model's version while users are on it.

    A standby is loaded and proven, gets a share of the users step by step, is judged against the old version
    at each step, and takes over; the old one is drained and stopped. What fails goes back by itself.

    Exit codes: 0 done, 1 failed or nobody answers, 2 invalid, 3 timed out and still running, 4 rolled back or
    aborted, 5 doesn't fit, 6 not now (another rollout is under way, or none to do that to), 7 Redis is down,
    130 detached by Ctrl-C while the rollout goes on.
    """


def _waiting(command: F) -> F:
    """Options of commands that stay until a rollout is over."""
    command = click.option("--json", "as_json", is_flag=True, help="JSON on stdout; one object per line.")(
        command
    )
    return click.option(
        "--timeout", type=DurationParam(), help="Return after so long, with code 3; the rollout goes on."
    )(command)


@swap.command()
@click.argument("model")
@click.option(
    "--to",
    "source",
    metavar="SOURCE",
    help="A directory, a .gguf file or a hub id.  [default: what it runs now]",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="OPTION=VALUE",
    help="A worker option to change; may be repeated.",
)
@click.option(
    "--steps",
    type=StepsParam(),
    default=_DEFAULTS.steps,
    help="Shares of the users, one after another.  [default: 5%,25%,100%]",
)
@click.option(
    "--hold", type=DurationParam(), default=_DEFAULTS.hold, help="Least time on each step.  [default: 2m]"
)
@click.option(
    "--strategy",
    type=click.Choice(["canary", "recreate"]),
    default="canary",
    show_default=True,
    help="recreate: stop the old version first, where two don't fit; requests wait meanwhile.",
)
@click.option(
    "--drain-limit",
    type=DurationParam(),
    default=_DEFAULTS.drain_limit,
    help="How long requests in flight may take to end.  [default: 15m]",
)
@click.option("--no-probes", is_flag=True, help="Judge by users alone, however few: waits for them.")
@click.option("--detach", is_flag=True, help="Return when it has begun.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and whether it fits.")
@which_fleet("-f", "--file")
@_waiting
def start(
    state: StateDir,
    model: str,
    source: str | None,
    settings: tuple[str, ...],
    no_probes: bool,
    detach: bool,
    dry_run: bool,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Bring in another version of a model: another source, other worker options, or both.

    What isn't named stays as it is. With --to of what it runs, its workers are replaced by new processes.
    """
    if source is None and not settings:
        raise click.UsageError("what is to change? Give --to, --set, or both")
    asked = StartRequest(
        source=source,
        set=settings_of(settings),
        options=refuse_bad(Options(probes=not no_probes, **options)),
        directory=os.getcwd(),
    )
    swaps = Swaps(state)
    if dry_run:
        plan = _ask(lambda: swaps.plan(model, asked))
        print_json(plan) if as_json else _show_plan(plan)
        sys.exit(plan.exit_code)
    begun = _ask(lambda: swaps.start(model, asked))
    if detach:
        _show_begun(begun, as_json)
    else:
        _stay(swaps, begun, timeout, as_json)


@swap.command()
@click.argument("model", required=False)
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def status(state: StateDir, model: str | None, as_json: bool) -> None:
    """Show a model's rollout that is under way, or its last one; without a model, all of them.

    Exit code 0 also where there was none: --json prints null, or [].
    """
    swaps = Swaps(state)
    found = _ask(lambda: swaps.all() if model is None else [swaps.latest(model)])
    if as_json:
        print_json(found if model is None else found[0])
    elif not any(found):
        click.echo(no_rollout(model) if model else no_rollout("any model"))
    for one in () if as_json else filter(None, found):
        make_console().print(page(one.rollout, one.starting))


@swap.command()
@click.argument("model")
@which_fleet("-f", "--file")
@_waiting
def watch(state: StateDir, model: str, timeout: float | None, as_json: bool) -> None:
    """Follow a rollout to its end; the exit code is how it ended. Ctrl-C leaves it alone."""
    swaps = Swaps(state)
    _stay(swaps, _ask(lambda: swaps.status(model)), timeout, as_json)


@swap.command()
@click.argument("model")
@which_fleet("-f", "--file")
@_waiting
@click.option("--detach", is_flag=True, help="Return when it has begun.")
def undo(state: StateDir, model: str, detach: bool, timeout: float | None, as_json: bool) -> None:
    """Go back to the version before the last rollout that was completed: for all users at once, when it is
    loaded and proven. What was aborted or rolled back has changed nothing, and is skipped."""
    swaps = Swaps(state)
    begun = _ask(lambda: swaps.undo(model))
    if detach:
        _show_begun(begun, as_json)
    else:
        _stay(swaps, begun, timeout, as_json)


def _commanded(name: str, text: str) -> None:
    @swap.command(name, help=text)
    @click.argument("model")
    @which_fleet("-f", "--file")
    @click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
    def command(state: StateDir, model: str, as_json: bool) -> None:
        _do(state, model, name, as_json)


_commanded("pause", "Stay where it is: no more users for the new version, and no end of the old one.")
_commanded("resume", "Go on with a paused rollout.")
_commanded("abort", "Go back to the old version. Too late once that takes no requests any more: `undo` then.")


@swap.command()
@click.argument("model")
@click.option("--full", is_flag=True, help="To the end, without any more judging.")
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def promote(state: StateDir, model: str, full: bool, as_json: bool) -> None:
    """Go to the next step now, whatever the judge says."""
    _do(state, model, "promote?full=1" if full else "promote", as_json)


def _do(state: StateDir, model: str, command: str, as_json: bool) -> None:
    done = _ask(lambda: Swaps(state).command(model, command))
    print_json(done) if as_json else click.echo(_line(done))


@swap.command()
@click.argument("model")
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def history(state: StateDir, model: str, as_json: bool) -> None:
    """List a model's rollouts that are over."""
    records = _ask(lambda: Swaps(state).history(model))
    if as_json:
        print_json(records)
    elif not records:
        click.echo("there was no rollout of this model that is over")
    else:
        make_console().print(_history(records))


T = TypeVar("T")


def _ask(question: Callable[[], T]) -> T:
    """The supervisor's answer; what it refuses ends the command with its code."""
    try:
        return question()
    except SwapRefused as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail("left before the supervisor answered; what it was asked it may do", EXIT_DETACHED)


def _stay(swaps: Swaps, begun: RolloutStatus, timeout: float | None, as_json: bool) -> None:
    """Shows it until it is over, and ends the command as it ended."""
    model = begun.rollout.model
    watching = Watch(as_json=as_json)
    try:
        code = watching.follow(swaps, begun, timeout)
    except SwapRefused as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        click.echo(f"\nthe rollout goes on; `pagefleet swap watch {model}` shows it", err=True)
        sys.exit(EXIT_DETACHED)
    finally:
        watching.close()
    if code is None:
        fail(f"still running; `pagefleet swap watch {model}` shows it", EXIT_STILL_RUNNING)
    sys.exit(code)


def _show_begun(begun: RolloutStatus, as_json: bool) -> None:
    print_json(begun) if as_json else click.echo(_line(begun))


def _line(found: RolloutStatus) -> str:
    rollout = found.rollout
    paused = ", paused" if rollout.paused else ""
    return f"rollout {rollout.id} of {rollout.model}: {rollout.phase}{paused}"


def _show_plan(plan: Plan) -> None:
    click.echo(f"{plan.model}: {plan.old.source} → {plan.new.source}")
    for name, (before, after) in plan.changes.items():
        click.echo(f"  {name}: {show_option(before)} → {show_option(after)}")
    options = plan.options
    if options.strategy == "canary":
        steps = ", ".join(f"{step:g}%" for step in options.steps)
        click.echo(f"steps: {steps}, at least {format_duration(options.hold)} on each")
    else:
        click.echo("recreate: users wait while the old version is stopped and the new one starts")
    click.echo(f"expected time: {in_words(plan.seconds)}, plus what requests in flight take to end")
    for worker in plan.workers:
        size = format_bytes(worker.total) if worker.total is not None else "unknown"
        click.echo(f"{worker.slot} on {worker.place}: {size}")
    for place in plan.places:
        with_both = f"{format_bytes(place.taken)} of {format_bytes(place.total)}"
        click.echo(f"{place.name}, with it: {with_both}")
    if plan.unknown:
        click.echo(f"unknown: {plan.unknown}", err=True)
    if plan.misfit or plan.problem:
        what = "can't run" if plan.invalid else "doesn't fit"
        click.echo(f"{what}: {plan.problem or plan.misfit}", err=True)


def _history(records: list[Record]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("ROLLOUT", "ENDED", "TOOK", "OUTCOME", "TO", "WHY"):
        table.add_column(column)
    for record in records:
        took = age(record.ended - record.started)
        to = describe_version(record.new, record.old)
        table.add_row(*map(Text, (record.id, _clock(record.ended), took, record.outcome, to, record.reason)))
    return table


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
