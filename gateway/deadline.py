"""A time limit that moves often: one timer of the event loop serves many of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `expired` once the loop's time reaches `due`; infinity: never.

    Moving it later costs nothing: the timer that was set looks again when it fires too early. To set a timer
    for each request costs more than most of what is done for it.
    """

    __slots__ = ("_at", "_expired", "_loop", "_timer", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self.due = math.inf
        self._loop = loop
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0  # when the timer fires

    def set(self, due: float) -> None:
        """In place of what was set before."""
        self.due = due
        if self._timer is not None:
            if self._at <= due:
                return
            self._timer.cancel()
        self._at = due
        self._timer = self._loop.call_at(due, self._look)

    def clear(self) -> None:
        """It never expires, until it is set again."""
        self.due = math.inf

    def cancel(self) -> None:
        """For good."""
        self.due = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.due == math.inf:
            return
        if self._loop.time() < self.due:
            self.set(self.due)
        else:
            self.due = math.inf
            self._expired()
