"""``python -m gateway``: one gateway process in the foreground, as the supervisor and systemd start it."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import click

from gateway.config import ConfigError, load_fleet
from gateway.identity.errors import StoreUnusable
from gateway.server import listen, serve


@click.command("pagefleet gateway", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", required=True, type=click.Path(path_type=Path), help="The fleet file.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Where the fleet's API keys and routes are; default: supervisor.state_dir.",
)
@click.option(
    "--routes",
    type=click.Path(path_type=Path),
    help="The supervisor's routes file; default: routes.json in the state directory.",
)
@click.option(
    "--fd", type=int, help="Descriptor of an inherited listening socket, in place of host and port."
)
@click.option("--host", help="Overrides gateway.host.")
@click.option("--port", type=click.IntRange(0, 65535), help="Overrides gateway.port; 0 takes a free one.")
@click.option("--parent-pid", type=int, help="Ends when this process is no longer its parent.")
@click.option("--slot", help="Which of the fleet's gateway processes this is; default: one by itself.")
@click.option("--generation", type=int, default=0, help="Counts the processes that filled the slot.")
def main(
    config: Path,
    state_dir: Path | None,
    routes: Path | None,
    fd: int | None,
    host: str | None,
    port: int | None,
    parent_pid: int | None,
    slot: str | None,
    generation: int,
) -> None:
    """One gateway process in the foreground."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if fd is not None and (host is not None or port is not None):
        raise click.UsageError("--fd can't be combined with --host or --port")
    try:
        fleet = load_fleet(config, check_sources=False)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    settings = fleet.gateway
    host, port = host or settings.host, settings.port if port is None else port
    try:
        listener = listen(host, port) if fd is None else socket.socket(fileno=fd)
    except OSError as error:
        where = f"descriptor {fd}" if fd is not None else f"{host}:{port}"
        click.echo(f"can't listen on {where}: {error.strerror}", err=True)
        sys.exit(2)
    state_dir = state_dir or fleet.supervisor.state_dir
    try:
        routes = routes or state_dir / "routes.json"
        followed = config if slot is not None else None
        serve(
            fleet,
            state_dir,
            routes,
            listener,
            parent_pid,
            slot=slot,
            generation=generation,
            fleet_file=followed,
        )
    except StoreUnusable as error:
        click.echo(str(error), err=True)
        sys.exit(1)  # not 2: what is busy or unreadable now may be there when the supervisor tries again


if __name__ == "__main__":
    main(prog_name="pagefleet gateway")
