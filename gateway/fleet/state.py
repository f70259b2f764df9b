"""The routes documents: one per model, what every gateway routes by.

The supervisor is the one writer. All documents live in one file, replaced as a whole: a reader sees the old
or the new one, never half of either, also after a power cut.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

FULL_WEIGHT = 10_000  # basis points

TargetState = Literal["starting", "ready", "draining", "down"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that may get requests: `slot` names its place, `generation` counts the processes that filled
    it, `restarts` those of them that took the place of a crashed one, since the supervisor started. Targets
    of one `variant` are replicas of each other; users are split between variants by weight."""

    slot: str
    generation: int
    address: str  # "unix:/path/to.sock" or "http://127.0.0.1:9001"
    weight_bp: int = FULL_WEIGHT
    state: TargetState = "starting"
    restarts: int = 0
    variant: str = ""

    @property
    def id(self) -> str:
        return f"{self.slot}.{self.generation}"


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """One model's document. `epoch` grows with every change; `salt` moves users to other buckets at a new
    rollout. `hold`: no target has weight, and gateways keep requests waiting instead of refusing them.
    `retired`: nobody finds the model any more; requests that wait for it are still served."""

    model: str
    epoch: int
    aliases: tuple[str, ...] = ()
    rollout_id: str | None = None
    salt: str = ""
    hold: bool = False
    retired: bool = False
    targets: tuple[Target, ...] = ()


class RoutesFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk. `epoch` is the sum of all changes, so a reader compares one number."""

    epoch: int = 0
    models: dict[str, Routes] = {}


def read_routes(path: Path) -> RoutesFile:
    """The documents at `path`; an empty set when there is no file. ValueError when it isn't ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RoutesFile)
    except FileNotFoundError:
        return RoutesFile()
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def write_routes(path: Path, routes: RoutesFile) -> None:
    """Durably replace the file: write a temporary, fsync, rename, fsync the directory."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(routes), indent=1))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
