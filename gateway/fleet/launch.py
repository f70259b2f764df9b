"""``python -m gateway.fleet.launch RUN SLOT``: what a unit of systemd executes.

It becomes the process that the supervisor has written down for the slot. A unit file is the same for all
slots and generations; what differs is in the slot's note, so starting one takes no change of units.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

SUFFIX = ".launch.json"
ENV_PREFIX = "PAGEFLEET_"  # as in gateway.config, which takes a second to load


@dataclass(frozen=True)
class Note:
    """A process to start, or one that was started. `log`: where its output goes."""

    argv: list[str]
    generation: int
    log: str


def path_of(run: Path, slot: str) -> Path:
    return run / f"{slot}{SUFFIX}"


def encode(note: Note) -> bytes:
    return json.dumps(asdict(note)).encode()


def read(path: Path) -> Note | None:
    """None when there is none that can be read."""
    try:
        return Note(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def notes(run: Path) -> dict[str, Note]:
    """All there are, by slot."""
    found = {path.name.removesuffix(SUFFIX): read(path) for path in run.glob(f"*{SUFFIX}")}
    return {slot: note for slot, note in found.items() if note is not None}


def forget(run: Path) -> None:
    for path in run.glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)


def main(run: str, slot: str) -> None:
    note = read(path_of(Path(run), slot))
    if note is None:
        print(
            f"{run} has no note on how to start {slot}: the supervisor starts it, nobody else",
            file=sys.stderr,
        )
        sys.exit(1)
    output = os.open(note.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # As for the supervisor's own children: they get their settings, whole and checked, on the command line.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    os.execve(note.argv[0], note.argv, {**environment, "PYTHONUNBUFFERED": "1"})


if __name__ == "__main__":
    main(*sys.argv[1:])
