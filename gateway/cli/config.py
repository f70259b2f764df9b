"""`pagefleet config`: what a fleet file says, what is wrong with it, what it would change, and the change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from gateway.cli import reconfigure
from gateway.cli.common import DurationParam, count_of, print_json, read_fleet, require_fleet
from gateway.cli.reconfigure import apply_fleet, ask_plan, show_plan, wanted_fleet
from gateway.cli.swap_display import describe_version
from gateway.cli.swap_options import StepsParam, refuse_bad
from gateway.config import ConfigError, FleetFile, load_fleet
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.rollout import Options
from gateway.fleet.statedir import StateDir
from gateway.fleet.versions import Versions

_state_dir = click.option(
    "--state-dir",
    metavar="DIR",
    help="State directory of the running fleet; default: the file's supervisor.state_dir.",
)


@click.group()
def config() -> None:
    """Check or show a fleet file, or bring the running fleet to it."""


@config.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def check(file: str, as_json: bool) -> None:
    """Report everything that is wrong with a fleet file; exit code 2 when something is."""
    if as_json:
        problems = _problems(file)
        print_json({"ok": not problems, "problems": problems})
        sys.exit(EXIT_INVALID if problems else 0)
    fleet = read_fleet(file)
    for warning in fleet.warnings():
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{file}: ok, {count_of(len(fleet.models), 'model')}")


@config.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of YAML.")
def show(file: str, as_json: bool) -> None:
    """Print a fleet file as it is used: with defaults, the environment, absolute paths, and no password.

    On stderr, models that run another version since a rollout: see `pagefleet swap history`.
    """
    fleet = read_fleet(file)
    data = json.loads(json.dumps(fleet.model_dump(), default=str))
    if fleet.gateway.redis_url is not None:
        from gateway.limits.redis_link import hidden

        data["gateway"]["redis_url"] = hidden(fleet.gateway.redis_url)
    if as_json:
        print_json(data)
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
    _tell_versions(StateDir(fleet.supervisor.state_dir), fleet)


def _tell_versions(state: StateDir, fleet: FleetFile) -> None:
    """Of models that run another version since a rollout, which stays as long as the file says the same."""
    versions = Versions(state.versions)
    for entry in fleet.models:
        running = versions.of(entry)
        if running is not None and running.version != running.file:
            runs = describe_version(running.version, running.file)
            click.echo(f"{entry.name}: runs {runs} since rollout {running.rollout_id}, not this", err=True)


@config.command()
@click.argument("file")
@_state_dir
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def diff(file: str, state_dir: str | None, as_json: bool) -> None:
    """Say what a fleet file would change about the running fleet, and how; nothing is changed.

    On stderr, models that run another version since a rollout, which stays where the file says nothing new.
    """
    state, fleet = _for_running(file, state_dir)
    plan = ask_plan(state, fleet)
    print_json(plan) if as_json else show_plan(plan)
    _tell_versions(state, fleet)


@config.command()
@click.argument("file")
@_state_dir
@click.option("--dry-run", is_flag=True, help="Say what would be done, or why it can't be.")
@click.option(
    "--steps", type=StepsParam(), default=Options().steps, help="Of a rollout.  [default: 5%,25%,100%]"
)
@click.option("--hold", type=DurationParam(), default=Options().hold, help="Of a rollout.  [default: 2m]")
@click.option(
    "--strategy",
    type=click.Choice(["canary", "recreate"]),
    default="canary",
    show_default=True,
    help="Of a rollout.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def apply(file: str, state_dir: str | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Bring the running fleet to a fleet file. What is unchanged isn't touched, and no request is lost.

    A model with another source or other worker options is swapped, as by `pagefleet swap start`.
    Waits for the end; Ctrl-C leaves it (exit code 130), and it goes on. Exit codes: 0 done, 2 the file is
    wrong, or something in it can't change while the fleet runs, 4 a rollout was rolled back, 5 it doesn't fit
    into memory, 6 a rollout or another change is under way, 7 some of it failed, and the rest is done.
    """
    wanted = refuse_bad(Options(**options))
    state, fleet = _for_running(file, state_dir)
    if dry_run:
        plan = reconfigure.dry_run(state, fleet, wanted)
        print_json(plan) if as_json else show_plan(plan)
        return
    plan = ask_plan(state, fleet)
    if not as_json:
        show_plan(plan)
    sys.exit(apply_fleet(state, fleet, plan, as_json, wanted))


def _for_running(file: str, state_dir: str | None) -> tuple[StateDir, FleetFile]:
    """The fleet that is meant, which must be up, and the file for it."""
    fleet = read_fleet(file, "; nothing was changed")
    for warning in fleet.warnings():
        click.echo(f"warning: {warning}", err=True)
    state = StateDir(Path(state_dir).expanduser() if state_dir else fleet.supervisor.state_dir)
    return state, wanted_fleet(fleet, require_fleet(state))


def _problems(file: str) -> list[dict[str, object]]:
    try:
        load_fleet(file)
    except ConfigError as error:
        return [
            {"source": problem.source, "line": problem.line, "key": problem.key, "message": problem.message}
            for problem in error.problems
        ]
    return []
