"""Why a fleet didn't come up, with the exit code of the command line."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.suggest import did_you_mean

EXIT_FAILED = 1
EXIT_INVALID = 2
EXIT_MISFIT = 5
EXIT_CONFLICT = 6
EXIT_DEGRADED = 7


def no_such_model(name: str, known: Iterable[str]) -> str:
    """What is said of a name that is no model's; `known`: all names, or the models'."""
    known = list(known)
    names = ", ".join(known) or "none"
    return f"the fleet has no model '{name}'; it has {names}{did_you_mean(name, known)}"


class FleetError(Exception):
    """Nothing was started, or everything that was has been stopped again."""

    exit_code = EXIT_FAILED


class InvalidFleet(FleetError):
    """The machine doesn't allow what the file asks for: a port in use, a directory that can't be written."""

    exit_code = EXIT_INVALID


class Conflict(FleetError):
    """Another supervisor owns the state directory."""

    exit_code = EXIT_CONFLICT
