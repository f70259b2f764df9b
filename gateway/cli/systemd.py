"""`pagefleet systemd`: the units by which systemd runs the fleet."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from gateway.cli.common import fail, print_json, read_fleet
from gateway.fleet import systemd as units_file
from gateway.fleet.errors import FleetError
from gateway.fleet.ledger import make_ledger, this_machine
from gateway.fleet.systemd import POLKIT_RULES, SystemdOptions


@click.group()
def systemd() -> None:
    """Have systemd run a fleet."""


@systemd.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write them to, made if it isn't there; default: print them.",
)
@click.option(
    "--user", "user_manager", is_flag=True, help="For your own manager (systemctl --user), not the system's."
)
@click.option(
    "--user-name",
    default="pagefleet",
    show_default=True,
    metavar="NAME",
    help="As whom the system's manager runs the fleet.",
)
@click.option("--mps", is_flag=True, help="With NVIDIA MPS, for workers that share a card.")
@click.option(
    "--test", "tested", is_flag=True, help="Have systemd check them (systemd-analyze verify) first."
)
@click.option("--dry-run", is_flag=True, help="With --out: say what would change; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def render(
    file: Path,
    out: Path | None,
    user_manager: bool,
    user_name: str,
    mps: bool,
    tested: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the units of a fleet file: supervisor, gateways, workers, the gateways' socket, a target.

    Relative paths in the fleet file count from here. What is to differ on this machine goes into drop-ins,
    which writing the units again leaves alone.
    """
    fleet = read_fleet(str(file))
    options = SystemdOptions(file, Path.cwd(), user_manager, user_name, mps)
    try:
        units_file.render(fleet, options)  # what is wrong is said before workers are asked for their sizes
        ledger = make_ledger(fleet, this_machine())
        units = units_file.render(fleet, options, ledger)
        if tested:
            units_file.check_with_systemd(units, user_manager)
    except FleetError as error:
        fail(str(error), error.exit_code)
    warnings = list(units_file.warnings(fleet, options, ledger))
    changed = [name for name, text in units.items() if out is None or _differs(out / name, text)]
    if out is not None and not dry_run:
        _write(out, {name: units[name] for name in changed})
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json({"units": units, "changed": changed, "out": out, "warnings": warnings})
    elif out is None:
        click.echo("\n".join(f"# {name}\n{text}" for name, text in units.items()), nl=False)
    else:
        _say_what_to_do(out, units, changed, user_manager, dry_run)


def _say_what_to_do(
    out: Path, units: dict[str, str], changed: list[str], user_manager: bool, dry_run: bool
) -> None:
    for name in units:
        state = "is as it should be" if name not in changed else "would change" if dry_run else "written"
        click.echo(f"{out / name}: {state}")
    if not changed:
        return
    command = "systemctl --user" if user_manager else "systemctl"
    if POLKIT_RULES in units:
        click.echo(f"{POLKIT_RULES} belongs into /etc/polkit-1/rules.d/", err=True)
    click.echo(f"then: {command} daemon-reload && {command} enable --now pagefleet.target", err=True)


def _differs(path: Path, text: str) -> bool:
    try:
        return path.read_text(errors="replace") != text
    except OSError:
        return True


def _write(folder: Path, units: dict[str, str]) -> None:
    """Each file as a whole, so that a reload never reads half of one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in units.items():
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{name}.", delete=False) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, folder / name)
    except OSError as error:
        fail(f"{folder} can't be written: {error.strerror}")
