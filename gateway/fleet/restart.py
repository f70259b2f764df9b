"""When a crashed process is started again, and when it isn't any more."""

from __future__ import annotations

import random
from collections import deque


class RestartPolicy:
    """Back-off 1, 2, 4 … `longest` seconds with jitter; `crashes` within `window` seconds end it.

    The back-off starts over after a life of at least `window` seconds.
    """

    def __init__(
        self, *, first: float = 1.0, longest: float = 60.0, crashes: int = 5, window: float = 600.0
    ) -> None:
        self._first = first
        self._longest = longest
        self._crashes = crashes
        self._window = window
        self._recent: deque[float] = deque(maxlen=crashes)
        self._in_a_row = 0

    def after_crash(self, now: float, lived: float) -> float | None:
        """Seconds until the next start, None when there were too many. `now` is monotonic."""
        self._recent.append(now)
        self._in_a_row = 1 if lived >= self._window else self._in_a_row + 1
        if len(self._recent) == self._crashes and now - self._recent[0] <= self._window:
            return None
        delay = min(self._longest, self._first * 2.0 ** min(self._in_a_row - 1, 30))
        return delay * random.uniform(0.8, 1.2)
