"""`pagefleet config`: what a fleet file says, and what is wrong with it."""

from __future__ import annotations

import json
import sys

import click
import yaml

from gateway.cli.common import count_of, print_json, read_fleet
from gateway.config import ConfigError, load_fleet
from gateway.fleet.errors import EXIT_INVALID


@click.group()
def config() -> None:
    """Check or show a fleet file."""


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
    """Print a fleet file as it is used: with defaults, the environment, absolute paths, and no password."""
    fleet = read_fleet(file)
    data = json.loads(json.dumps(fleet.model_dump(), default=str))
    if fleet.gateway.redis_url is not None:
        from gateway.limits.redis_link import hidden

        data["gateway"]["redis_url"] = hidden(fleet.gateway.redis_url)
    if as_json:
        print_json(data)
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)


def _problems(file: str) -> list[dict[str, object]]:
    try:
        load_fleet(file)
    except ConfigError as error:
        return [
            {"source": problem.source, "line": problem.line, "key": problem.key, "message": problem.message}
            for problem in error.problems
        ]
    return []
