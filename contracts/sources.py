"""How a model's source is written: a path, `random:CONFIG.json`, or a model of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from contracts.suggest import closest

RANDOM: Final = "random:"
_HUB_ID: Final = re.compile(
    r"(?!.*/\.\.?(?:/|$))(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[\w./-]+\.gguf))?"
)
NEEDED: Final = "needed is a .gguf file, or a directory with config.json and *.safetensors"
_WEIGHTS: Final = (".gguf", ".safetensors")


def hub_id(source: str, bases: Sequence[Path] = (Path(),)) -> re.Match[str] | None:
    """The groups `repo`, `revision` and `file` of a source that isn't there as a path but may be on the hub;
    None for a path with a mistake in it, which nobody should have to wait for the hub to hear of.

    What begins as a directory below one of `bases` is such a path, unless it names a revision.
    """
    match = _HUB_ID.fullmatch(source)
    if match is None or (match["file"] is None and source.endswith(_WEIGHTS)):
        return None
    if match["revision"] is None and any(_is_directory(base / source.split("/")[0]) for base in bases):
        return None
    return match


def mistake(source: str, bases: Sequence[Path] = (Path(),)) -> str:
    """What may help with a path that isn't there and no hub_id: a hint, which begins with a semicolon."""
    written = _HUB_ID.fullmatch(source) is not None
    on_the_hub = f"; the hub's model of that name is {source}@main" if written and "@" not in source else ""
    if written and source.endswith(_WEIGHTS):
        on_the_hub = "; a file of the hub is written org/name/file.gguf"
    elif not written and source[:1] not in "./~" and not source.endswith(_WEIGHTS):
        on_the_hub = "; a model of the hub is written org/name, org/name@revision or org/name/file.gguf"
    return (_nearby(source, bases) or f"; {NEEDED}") + on_the_hub


def _nearby(source: str, bases: Sequence[Path]) -> str:
    """The path that is most like it, where only its last part is wrong."""
    place, _, name = source.rstrip("/").rpartition("/")
    place = f"{place}/" if place or source.startswith("/") else ""
    known = [name for base in bases for name in _names_in(base / place)]
    found = closest(name, known)
    return "" if found is None else f"; did you mean '{place}{found}'?"


def _names_in(directory: Path) -> list[str]:
    """Names of what may be a model there."""
    try:
        paths = sorted(directory.expanduser().iterdir())
        return [path.name for path in paths if path.suffix in _WEIGHTS or path.is_dir()]
    except (OSError, ValueError, RuntimeError):  # not readable, a NUL in it, no such user
        return []


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
