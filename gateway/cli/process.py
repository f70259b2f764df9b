"""`pagefleet worker`, `gateway`, `version`: one process in the foreground."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version as installed_version

import click

from gateway.cli.common import print_json
from gateway.fleet.commands import PYTHON

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.command(context_settings=_PASS_THROUGH)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run one worker in the foreground; `pagefleet worker --help` shows its options."""
    _become("worker", arguments)


@click.command(context_settings=_PASS_THROUGH)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gateway(arguments: tuple[str, ...]) -> None:
    """Run one gateway in the foreground; `pagefleet gateway --help` shows its options."""
    _become("gateway", arguments)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def version(as_json: bool) -> None:
    """Print the version."""
    number = installed_version("pagefleet")
    if as_json:
        print_json({"pagefleet": number, "python": platform.python_version()})
    else:
        click.echo(f"pagefleet {number}")


def _become(package: str, arguments: tuple[str, ...]) -> None:
    os.execv(PYTHON[0], [*PYTHON, package, *arguments])
