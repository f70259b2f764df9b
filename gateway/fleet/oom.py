"""Does the kernel end processes for want of memory?"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
RECENT = 10.0  # seconds; a large process takes some to be gone, and is dead before that is noticed


def oom_kills() -> int:
    """How many it has ended since the machine's boot, in all control groups; 0 where it doesn't say."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class OomWatch:
    """Looks from time to time, and so knows at the end of a process whether the kernel has just ended one."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def look(self) -> None:
        self._seen.append((time.monotonic(), oom_kills()))
        self._forget()

    def has_killed(self) -> bool:
        """Since the first look, or the last one that isn't recent."""
        self._forget()
        return bool(self._seen) and oom_kills() > self._seen[0][1]

    def _forget(self) -> None:
        edge = time.monotonic() - RECENT
        while len(self._seen) > 1 and self._seen[1][0] < edge:
            self._seen.popleft()
