"""Limits set while the fleet runs, on their way into this gateway: by a file, and by Redis if there is.

A decision that comes later than `LOOK_EVERY` after the last look at the file looks first, as with keys: what
this gateway's machine sets holds for all requests that come so much later, however busy the gateway or slow
Redis is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from gateway.limits.overrides import Entry, Overrides, OverridesFile, OverridesUnusable

LOOK_EVERY = 0.1  # seconds that a change of the file may go unseen
POLL_SECONDS = 0.2

log = logging.getLogger(__name__)


class Shared(Protocol):
    """Where gateways share them: `RedisOverrides`."""

    async def exchange(self, ours: Overrides, *, changed: bool) -> dict[str, Entry]:
        """OverridesUnusable, whatever goes wrong."""

    async def aclose(self) -> None: ...


class LiveOverrides:
    """Keeps `apply` told of what is set. What was seen last holds while file or Redis can't be read."""

    def __init__(
        self, file: OverridesFile, shared: Shared | None, apply: Callable[[Overrides], None]
    ) -> None:
        self._file = file
        self._shared = shared
        self._apply = apply
        self._entries: dict[str, Entry] = {}
        self._complaints: dict[str, str] = {}  # about the file, and about what is shared
        self._task: asyncio.Task[None] | None = None
        self._unshared = True  # what is in the file was perhaps set while no gateway ran
        self._looked_at = time.monotonic()
        self._read()

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll(), name="limits")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._shared is not None:
            await self._shared.aclose()

    def look(self) -> None:
        """To be called before limits are decided."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            if self._file.changed():
                self._read()

    async def _poll(self) -> None:
        while True:
            self.look()
            if self._shared is not None:
                unshared, self._unshared = self._unshared, False
                self._unshared |= not await self._exchange(self._shared, unshared)
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> None:
        try:
            entries = self._file.read()
        except OverridesUnusable as error:
            self._complain("file", str(error))
            return
        self._complaints.pop("file", None)
        if entries != self._entries:
            self._unshared = True
            self._use(entries)

    async def _exchange(self, shared: Shared, changed: bool) -> bool:
        """False when there is more to share, or Redis couldn't be asked (the limiter says that, loudly)."""
        try:
            theirs = await shared.exchange(self._entries, changed=changed)
        except OverridesUnusable as error:
            self._complain("shared", str(error))
            return False
        self._complaints.pop("shared", None)
        if theirs:
            everything = {**self._entries, **theirs}
            self._use(everything)
            try:
                await asyncio.to_thread(self._file.merge, theirs)  # it waits for locks and disks
                self._read()  # not what it was then: more may have been set since, and seen
                return self._entries == everything
            except OverridesUnusable as error:  # they hold all the same, until this gateway ends
                self._complain("file", str(error))
        return True

    def _use(self, entries: dict[str, Entry]) -> None:
        if entries != self._entries:
            self._entries = entries
            self._apply(entries)
            log.info("limits: %d set while running", sum(bool(entry.bounds) for entry in entries.values()))

    def _complain(self, about: str, complaint: str) -> None:
        if complaint != self._complaints.get(about):
            self._complaints[about] = complaint
            log.error("%s", complaint)
