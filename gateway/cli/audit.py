"""`pagefleet audit`: what was asked, request by request."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from gateway.cli.common import fail, printable, warn_about_models, which_fleet
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.statedir import StateDir
from gateway.usage.reader import AuditTail, Entry
from gateway.usage.record import AuditLine, inert

_STATUS = re.compile(r"[1-5](\d\d|xx)")


class _Audit(msgspec.Struct):
    file: str | None = None


class _Gateway(msgspec.Struct):
    audit: _Audit


class _Fleet(msgspec.Struct):
    """The part of a running fleet's configuration that says where the lines are."""

    gateway: _Gateway


def _status(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _STATUS.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no status; write one such as 429, or a class such as 4xx")
    return value


@click.group()
def audit() -> None:
    """Read the audit file of a fleet (gateway.audit.file)."""


@audit.command()
@which_fleet("--file")
@click.option("-f", "--follow", "follow", is_flag=True, help="Go on as lines come.")
@click.option(
    "-n", "--lines", default=20, show_default=True, type=click.IntRange(min=0), help="Lines to begin with."
)
@click.option("--user", help="Requests of this user only.")
@click.option("--key", help="Requests with the key of this id only.")
@click.option("--model", help="Requests for this model only.")
@click.option("--status", callback=_status, help="Answers with this status only: 429, or 4xx.")
@click.option("--json", "as_json", is_flag=True, help="The lines as they are in the file.")
def tail(
    state: StateDir,
    follow: bool,
    lines: int,
    user: str | None,
    key: str | None,
    model: str | None,
    status: str | None,
    as_json: bool,
) -> None:
    """Show the last requests, oldest first; also of a fleet that is down."""
    path = _audit_file(state)
    show = _show_json if as_json else _show
    try:
        end = AuditTail(path, _filter(user, key, model, status))
    except OSError as error:
        fail(f"the audit file {path} can't be read: {error.strerror}")
    with contextlib.closing(end), contextlib.suppress(KeyboardInterrupt):
        found = end.last(lines)
        if model is not None and lines and not found:
            warn_about_models(state, [model])
        for entry in found:
            show(entry)
        if follow:
            for entry in end.follow():
                show(entry)


def _audit_file(state: StateDir) -> Path:
    try:
        file = msgspec.json.decode(state.config.read_bytes(), type=_Fleet).gateway.audit.file
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError):
        fail(f"no fleet was up in {state.root}; --file or --state-dir names another", EXIT_INVALID)
    if file is None:
        fail("this fleet writes no audit file; gateway.audit.file names one", EXIT_INVALID)
    return Path(file)


def _filter(
    user: str | None, key: str | None, model: str | None, status: str | None
) -> Callable[[AuditLine], bool]:
    def wanted(line: AuditLine) -> bool:
        return (
            user in (None, line.user)
            and key in (None, line.key_id)
            and model in (None, line.model)
            and (status is None or str(line.status) == status or status == f"{line.status // 100}xx")
        )

    return wanted


def _show_json(entry: Entry) -> None:
    click.echo(inert(entry[0]).decode("utf-8", "replace"))


def _show(entry: Entry) -> None:
    """One line a request; what clients wrote is shown without what a terminal would obey."""
    line = entry[1]
    tokens = "-" if line.prompt_tokens is None else f"{line.prompt_tokens}+{line.completion_tokens}"
    first = "" if line.first_token_seconds is None else f", first after {line.first_token_seconds:.3f} s"
    parts = [
        line.time[:19].replace("T", " ") + "Z",
        str(line.status),
        line.code or line.finish_reason or "-",
        line.user if line.user is not None else "-",
        line.key_id or "-",
        line.target or line.model or "-",
        line.path,
        f"{tokens} tokens, {line.seconds:.3f} s{first}",
        line.request_id,
    ]
    click.echo("  ".join(map(printable, parts)))
