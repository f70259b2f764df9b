"""What commands share: finding the fleet, talking to its supervisor, ending with the right code."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
import httpx
import msgspec

from contracts.units import parse_duration
from gateway.config import ConfigError, FleetFile, load_fleet
from gateway.fleet.admin import FleetStatus
from gateway.fleet.driver.routes import Failure
from gateway.fleet.errors import EXIT_FAILED, EXIT_INVALID, no_such_model
from gateway.fleet.state import read_routes
from gateway.fleet.statedir import StateDir
from gateway.usage.record import inert

EXIT_STILL_RUNNING = 3
DEFAULT_STATE_DIR = ".pagefleet"
PATIENCE = 20.0  # seconds for answers that are there at once, unless the machine is busy
ANSWER_WITHIN = 180.0  # seconds; some questions take a look at the sizes of models

P = ParamSpec("P")
T = TypeVar("T")


class DurationParam(click.ParamType[Any]):
    """``2m``; a number alone is seconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Ends the command with one line on stderr."""
    click.echo(f"pagefleet: {message}", err=True)
    sys.exit(code)


def print_json(value: Any) -> None:
    """One line of JSON on stdout, without what a terminal would obey."""
    click.echo(inert(msgspec.json.encode(value, enc_hook=str)).decode())


def printable(text: str) -> str:
    """`text` with escapes for what a terminal would obey; clients choose their users' names."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def count_of(count: int, thing: str) -> str:
    """``1 model``, ``2 models``"""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def read_fleet(path: str, consequence: str = "") -> FleetFile:
    """The fleet file, or the end of the command with all its problems on stderr and code 2; `consequence`
    says what that means."""
    try:
        return load_fleet(path)
    except ConfigError as error:
        count = len(error.problems)
        for problem in error.problems:
            click.echo(str(problem), err=True)
        fail(f"{count_of(count, 'problem')} in {path}{consequence}", EXIT_INVALID)


def which_fleet(*file_flags: str) -> Callable[[Callable[P, None]], Callable[..., None]]:
    """Options that say which fleet is meant; the command gets `state`, its StateDir."""
    return functools.partial(_with_state_dir, file_flags)


def _with_state_dir(file_flags: tuple[str, ...], command: Callable[P, None]) -> Callable[..., None]:
    @click.option(
        *file_flags, "file", metavar="FILE", help="The fleet file; its supervisor.state_dir is used."
    )
    @click.option(
        "--state-dir",
        metavar="DIR",
        envvar="PAGEFLEET_SUPERVISOR__STATE_DIR",
        help=f"The fleet's state directory; default: ./{DEFAULT_STATE_DIR}.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, file: str | None, state_dir: str | None, **kwargs: Any) -> None:
        given = click.get_current_context().get_parameter_source("state_dir")
        if file is not None and given is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("give --file or --state-dir, not both")
        if file is not None:
            root = read_fleet(file).supervisor.state_dir
        else:
            root = Path(state_dir or DEFAULT_STATE_DIR).expanduser()
        command(*args, state=StateDir(root), **kwargs)  # type: ignore[arg-type]

    return wrapped


class Silent(Exception):
    """A supervisor is there, and doesn't answer; the message says what a person can do."""


def why_unreachable(state: StateDir, error: Exception) -> str:
    """What a person can do where no supervisor has answered."""
    if isinstance(error, httpx.TimeoutException):
        holder = state.holder or "unknown"
        return (
            f"the supervisor in {state.root} (process {holder}) doesn't answer: it is stopped, or the "
            "machine is too busy; what it was asked it does when it goes on"
        )
    if _is_denied(state):
        return f"the fleet in {state.root} is another user's, who alone may ask it ({as_owner(state.root)})"
    return _displaced(state) or _none_up(state)


def as_owner(path: Path) -> str:
    """The command that makes one the owner of a path, or of what of the way to it can be seen."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            owner = place.stat().st_uid
            with contextlib.suppress(KeyError):
                return f"sudo -u {pwd.getpwuid(owner).pw_name}"
            return f"sudo -u '#{owner}'"
    return "sudo -u USER"


def _none_up(state: StateDir) -> str:
    return f"no fleet is up in {state.root}; `pagefleet up FILE` starts one, --state-dir names another"


def _displaced(state: StateDir) -> str | None:
    """What to do where something else has the place of a running fleet's socket."""
    place = state.admin_socket
    if not os.path.lexists(place) or place.is_socket() or not state.is_held():
        return None
    return (
        f"the supervisor in {state.root} (process {state.holder or 'unknown'}) can't be asked: {place} is no "
        "socket; move it away, and the supervisor makes its own there within seconds"
    )


def _is_denied(state: StateDir) -> bool:
    try:
        os.stat(state.admin_socket)
        return not os.access(state.admin_socket, os.W_OK)
    except PermissionError:
        return True
    except OSError:
        return False


def supervisor_client(state: StateDir) -> httpx.Client:
    """Of the supervisor's admin socket; it waits for PATIENCE where a request doesn't say otherwise."""
    # Certificates, which aren't needed, take long to load. A connection for each question: one that is kept
    # may be given up just as it is used again.
    limits = httpx.Limits(max_keepalive_connections=0)
    transport = httpx.HTTPTransport(uds=str(state.admin_socket), verify=False, limits=limits)
    return httpx.Client(transport=transport, base_url="http://supervisor", timeout=PATIENCE, trust_env=False)


class _Refused(msgspec.Struct):
    error: Failure


def refusal_in(response: httpx.Response) -> Failure:
    """What an answer of 400 or more says; msgspec.MsgspecError when it is none of a supervisor's."""
    return msgspec.json.decode(response.content, type=_Refused).error


def ask_supervisor(state: StateDir, method: str, path: str) -> FleetStatus | None:
    """The supervisor's answer, None when no supervisor is up there; the command ends when one is and doesn't
    answer."""
    try:
        return ask_if_it_answers(state, method, path)
    except Silent as error:
        fail(str(error))


def ask_if_it_answers(state: StateDir, method: str, path: str) -> FleetStatus | None:
    """The supervisor's answer, None when no supervisor is up there; Silent when one is and doesn't answer."""
    with supervisor_client(state) as client:
        try:
            response = client.request(method, path)
            return msgspec.json.decode(response.content, type=FleetStatus)
        except httpx.TimeoutException as error:
            raise Silent(why_unreachable(state, error)) from None
        except (httpx.TransportError, OSError) as error:
            if isinstance(error, httpx.ConnectError) and _is_denied(state):
                fail(why_unreachable(state, error))
            if displaced := _displaced(state):
                raise Silent(displaced) from None
            return None
        except msgspec.MsgspecError:
            fail(f"the supervisor in {state.root} answered in a way this version doesn't understand")


def call_supervisor(state: StateDir, method: str, path: str, kind: type[T], content: bytes = b"") -> T:
    """What the supervisor answers; the command ends with its words and code when it refuses, or isn't up."""
    with supervisor_client(state) as client:
        try:
            response = client.request(method, path, content=content, timeout=ANSWER_WITHIN)
        except (httpx.HTTPError, OSError) as error:
            fail(why_unreachable(state, error))
    try:
        if response.status_code >= 400:
            refusal = refusal_in(response)
            fail(refusal.message, refusal.exit_code)
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError:
        fail(f"the supervisor in {state.root} answered in a way this version doesn't understand")


def fleet_names(state: StateDir) -> list[str]:
    """All names that requests may use, also those of a fleet that is down; none where that isn't known."""
    try:
        routes = read_routes(state.routes).models.values()
    except (OSError, ValueError):
        return []
    return [name for model in routes for name in (model.model, *model.aliases)]


def warn_about_models(state: StateDir, models: Iterable[str]) -> None:
    """Of names that may be misspelt, though the fleet may have had such a model, or get it later."""
    known = fleet_names(state)
    for name in models:
        if known and name not in known:
            click.echo(f"warning: {no_such_model(name, known)}", err=True)


def require_fleet(state: StateDir) -> FleetStatus:
    """The fleet's status; ends the command when none is up."""
    status = ask_supervisor(state, "GET", "/status")
    if status is None:
        fail(_none_up(state))
    return status
