"""A gateway process follows its fleet file: what can change while it serves does so within half a second.

The supervisor replaces the file as a whole after it was checked, so what is read is either version. One that
can't be used changes nothing but the log. Which keys are followed is in gateway/fleet/reconcile.py: names,
limits and time limits here, everything else by processes that start anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from gateway.config import ConfigError, FleetFile, load_fleet

POLL_SECONDS = 0.3

log = logging.getLogger(__name__)


def digest(data: bytes) -> int:
    """Tells one version of the file from another; a number that a double holds."""
    return zlib.crc32(data)


class Reload:
    """Calls `use` with the fleet file and its digest, first as it is, then with each new version that is
    good."""

    def __init__(self, path: Path, use: Callable[[FleetFile, int], None]) -> None:
        self._path = path
        self._use = use
        self._signature: tuple[int, int, int] | None = None

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            signature = self._look()
            if signature != self._signature:
                self._signature = signature
                if signature is not None:  # one that is gone for a moment is written again
                    await self._read()
            await asyncio.sleep(POLL_SECONDS)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    async def _read(self) -> None:
        try:
            fleet, number = await asyncio.to_thread(_load, self._path)  # checking takes milliseconds
        except (OSError, ConfigError) as error:
            log.error("%s can't be used, what was read before still holds: %s", self._path, error)
            return
        self._use(fleet, number)
        log.info("names and limits are those of %s, digest %08x", self._path, number)


def _load(path: Path) -> tuple[FleetFile, int]:
    data = path.read_bytes()
    return load_fleet(path, check_sources=False, data=data), digest(data)
