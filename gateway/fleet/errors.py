"""Why a fleet didn't come up, with the exit code of the command line."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_INVALID = 2
EXIT_CONFLICT = 6
EXIT_DEGRADED = 7


class FleetError(Exception):
    """Nothing was started, or everything that was has been stopped again."""

    exit_code = EXIT_FAILED


class InvalidFleet(FleetError):
    """The machine doesn't allow what the file asks for: a port in use, a directory that can't be written."""

    exit_code = EXIT_INVALID


class Conflict(FleetError):
    """Another supervisor owns the state directory."""

    exit_code = EXIT_CONFLICT
