"""What the supervisor wants of whatever runs its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Role = Literal["gateway", "worker"]
ROLES: tuple[Role, ...] = ("gateway", "worker")  # in the order in which they end


class Process(Protocol):
    """A started process. `exited`: its code, negative for a signal, once it and all it started are gone."""

    exited: asyncio.Future[int]

    @property
    def pid(self) -> int | None:
        """None until it is known."""

    @property
    def reason(self) -> str | None:
        """Why it ended, where more is known than its code."""

    def kill(self) -> None:
        """Ends the process and everything it started."""

    async def stop(self, patience: float) -> bool:
        """Asks it to drain and end, waits `patience` seconds, kills. True when it ended by itself."""


class Backend(Protocol):
    def spawn(
        self,
        argv: Sequence[str],
        *,
        role: Role,
        slot: str,
        generation: int,
        log: Path,
        fds: Sequence[int] = (),
        memory: Callable[[], int | None] | None = None,
    ) -> Process:
        """Starts a process; OSError when it can't be. `memory`: how many bytes of the host's it may take,
        asked on another thread by a backend that can see to that."""


@dataclass(frozen=True)
class Found:
    """A living process that an earlier supervisor started. `ready`: it has said so to who watches it."""

    process: Process
    role: Role
    slot: str
    generation: int
    argv: Sequence[str]
    ready: bool
