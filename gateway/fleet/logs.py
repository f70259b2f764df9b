"""Log files: each process appends to its own by itself, so its last words are kept in a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROTATE_AT = 16 * 1024**2
KEEP = 3
_TAIL_BYTES = 64 * 1024
_LONGEST = 400  # characters of a line that is shown elsewhere


def open_log(path: Path) -> int:
    """A descriptor for a child's stdout and stderr; appending, so that `rotate` may cut the file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def rotate(path: Path, limit: int = ROTATE_AT, keep: int = KEEP) -> bool:
    """Moves a log of more than `limit` bytes to PATH.1 (and .1 to .2 …).

    The writer keeps its descriptor, so the file is copied and then cut; a line written in between is lost.
    """
    try:
        if path.stat().st_size <= limit:
            return False
    except FileNotFoundError:
        return False
    for number in range(keep - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            os.replace(older, path.with_name(f"{path.name}.{number + 1}"))
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True


def inert(line: str) -> str:
    """A line for people, bounded and without what a terminal would obey: a file may have put it there."""
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
    return line if line.isprintable() else "".join(map(_shown, line))


def _shown(character: str) -> str:
    if character.isprintable() or character == "\t":
        return character
    return character.encode("unicode_escape").decode()


def tail(path: Path, lines: int, start: int = 0) -> list[str]:
    """The last `lines` lines after byte `start`."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(size - _TAIL_BYTES, start if start <= size else 0)
            file.seek(begin)
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:] if lines > 0 else []
