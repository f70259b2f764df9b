"""`pagefleet nginx`: the configuration of an nginx in front of the fleet."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from gateway.cli.common import fail, print_json, read_fleet
from gateway.config import FleetFile
from gateway.fleet import nginx as nginx_file
from gateway.fleet.errors import FleetError, InvalidFleet
from gateway.fleet.nginx import NginxOptions
from gateway.fleet.state import RoutesFile, read_routes
from gateway.fleet.statedir import StateDir


@click.group()
def nginx() -> None:
    """Put nginx in front of a fleet."""


@nginx.command()
@click.argument("file")
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    help="PORT, HOST:PORT or unix:/PATH; repeatable. Default: 443 with TLS, else 127.0.0.1:8080.",
)
@click.option(
    "--server-name",
    "server_names",
    multiple=True,
    default=["_"],
    metavar="NAME",
    help="Host name that clients use; repeatable. Default: any.",
)
@click.option("--tls-cert", "certificate", metavar="PATH", help="Certificate chain (PEM); none: no TLS.")
@click.option("--tls-key", "key", metavar="PATH", help="Its private key.")
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="ADDRESS",
    help="Gateway, HOST:PORT or unix:/PATH; repeatable. Default: the fleet file's.",
)
@click.option(
    "--max-fails",
    type=click.IntRange(0, 1_000_000),
    default=3,
    show_default=True,
    help="Failures within --fail-timeout after which an instance gets no requests.",
)
@click.option(
    "--fail-timeout",
    type=click.IntRange(1, 86400),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="And for how long.",
)
@click.option(
    "--user-id",
    type=click.Choice(["drop", "client"]),
    default="drop",
    show_default=True,
    help="Whether a client's X-User-Id goes on.",
)
@click.option(
    "--htpasswd", metavar="PATH", help="Users and passwords that nginx checks; they become X-User-Id."
)
@click.option(
    "--monitoring",
    multiple=True,
    metavar="NETWORK",
    help="Who may see /metrics, /ready and /version; repeatable. Default: nobody.",
)
@click.option(
    "--access-log",
    metavar="PATH",
    help="Default: /var/log/nginx/pagefleet.log, or access.log in the directory of --standalone.",
)
@click.option(
    "--standalone", is_flag=True, help="A whole configuration, for an nginx of the fleet's own user."
)
@click.option(
    "--per-model",
    is_flag=False,
    flag_value="path",
    type=click.Choice(["path", "port"]),
    default=None,
    help="A path or a port for each model, straight to its workers, by their weights.",
)
@click.option(
    "--first-port",
    type=click.IntRange(1, 65535),
    default=9001,
    show_default=True,
    help="Of --per-model port.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write there, as a whole or not at all."
)
@click.option("--test", "tested", is_flag=True, help="Have the real nginx check it (nginx -t) first.")
@click.option("--dry-run", is_flag=True, help="With --out: say whether the file would change; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def render(file: str, out: Path | None, tested: bool, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Print nginx's configuration for a fleet file.

    It belongs into nginx's http block; with --standalone it is a whole one. Swaps through the gateway
    need no reload of nginx; the weights of --per-model change by rendering again and a reload.
    """
    fleet = read_fleet(file)
    options = _options(given)
    try:
        routes = _routes(fleet) if options.per_model else None
        text = nginx_file.render(fleet, options, routes)
        warnings = list(nginx_file.warnings(fleet, options))
        verdict = _tested(fleet, options, routes) if tested else None
    except FleetError as error:
        fail(str(error), error.exit_code)
    changed = out is None or not out.exists() or out.read_text(errors="replace") != text
    if out is not None and changed and not dry_run:
        _write(out, text)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json({"config": text, "warnings": warnings, "test": verdict, "out": out, "changed": changed})
        return
    if verdict is not None:
        click.echo(verdict, err=True)
    if out is None:
        click.echo(text, nl=False)
    else:
        click.echo(
            f"{out}: {('would change' if dry_run else 'written') if changed else 'is as it should be'}"
        )


def _options(given: dict[str, Any]) -> NginxOptions:
    if given["access_log"] is None:
        given["access_log"] = "access.log" if given["standalone"] else NginxOptions.access_log
    if given["standalone"]:
        given["error_log"] = "error.log"
        given["user"] = "root" if os.geteuid() == 0 else None  # else it would become nobody
    return NginxOptions(**given)


def _routes(fleet: FleetFile) -> RoutesFile:
    path = StateDir(fleet.supervisor.state_dir).routes
    if not path.exists():
        raise InvalidFleet(f"{path} isn't there: --per-model needs workers; start the fleet first")
    try:
        return read_routes(path)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidFleet(f"{path} can't be read: {error}") from None


def _tested(fleet: FleetFile, options: NginxOptions, routes: RoutesFile | None) -> str:
    """nginx's verdict on the same configuration as a whole one, with its logs where anybody may write."""
    logs = {"access_log": "access.log", "error_log": "error.log"}
    whole = dataclasses.replace(options, standalone=True, **logs)  # type: ignore[arg-type]
    return nginx_file.check_with_nginx(nginx_file.render(fleet, whole, routes))


def _write(path: Path, text: str) -> None:
    """Replaces the file as a whole, so that a reload never reads half of it."""
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, mode)
        os.replace(file.name, path)
    except OSError as error:
        fail(f"{path} can't be written: {error.strerror}")
