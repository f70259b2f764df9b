"""Whether a worker should get requests: what its answers showed, and what it said when it was asked.

Two sources. *Passive*: connections refused or lost and answers of 5xx, counted as nginx does (`max_fails`
within `fail_timeout`, then none for `fail_timeout`, then one trial). *Active*: `gateway/prober.py` asks who
it is and whether it gets on. Neither a 4xx, a client that left, a slow answer nor a worker that refuses
because it is full or drains says anything against a worker.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

log = logging.getLogger(__name__)


class FailureSettings(Protocol):
    """Seconds; `max_fails` 0: failures are not counted."""

    @property
    def max_fails(self) -> int: ...
    @property
    def fail_timeout(self) -> float: ...


class HealthSettings(FailureSettings, Protocol):
    """Seconds."""

    @property
    def probe_interval(self) -> float: ...
    @property
    def probe_timeout(self) -> float: ...


class Health:
    """What is known about one target.

    `clear`: nothing speaks against it; the only thing that is read while all is well. `identified`: it has
    said that it is the process that the routes name; until then, and when it says otherwise, it gets nothing
    in any case. `asked`: the first probe has an outcome. `up`: it makes progress, as far as it can be asked.
    """

    __slots__ = (
        "_fails",
        "_first_fail",
        "_name",
        "_retry_at",
        "_settings",
        "asked",
        "clear",
        "identified",
        "up",
    )

    def __init__(self, name: str, settings: FailureSettings, *, probed: bool) -> None:
        self._name = name
        self._settings = settings
        self._fails = 0
        self._first_fail = 0.0
        self._retry_at: float | None = None  # set while ejected
        self.asked = self.identified = self.clear = not probed
        self.up = True

    @property
    def serving(self) -> bool:
        """Whether it counts as up in metrics."""
        return self.identified and self.up and self._retry_at is None

    def admits(self, now: float) -> bool:
        """Whether it may get a request now; an ejected one may get a trial when its time is over."""
        return self.identified and self.up and (self._retry_at is None or now >= self._retry_at)

    def taken(self, now: float) -> None:
        """A target that isn't clear got a request: the next trial is a whole `fail_timeout` later, whatever
        becomes of this one (its client may leave)."""
        if self._retry_at is not None:
            self._retry_at = now + self._settings.fail_timeout

    def failed(self) -> None:
        """A connection was refused or lost, or the answer was a failure of the worker's."""
        limit, now = self._settings.max_fails, time.monotonic()
        if self._retry_at is not None:
            self._retry_at = now + self._settings.fail_timeout
            return
        if now - self._first_fail > self._settings.fail_timeout:
            self._fails, self._first_fail = 0, now
        self._fails += 1
        if limit and self._fails >= limit:
            self._retry_at = now + self._settings.fail_timeout
            log.warning(
                "target %s failed %d times: no requests for %g s",
                self._name,
                self._fails,
                self._settings.fail_timeout,
            )
            self._settle()

    def succeeded(self) -> None:
        """It answered. Only to be called when it isn't clear."""
        if self._retry_at is not None:
            self._retry_at = None
            self._fails = 0
            log.info("target %s answers again", self._name)
            self._settle()

    def probed(self, *, identified: bool, up: bool, why: str = "") -> None:
        """The outcome of a probe."""
        before = (self.asked, self.identified, self.up)
        self.asked, self.identified, self.up = True, identified, up
        if before == (True, identified, up):
            return
        if not identified:
            log.error("target %s gets no requests: %s", self._name, why)
        elif not up:
            log.warning("target %s is down: %s", self._name, why)
        elif before[0]:
            log.info("target %s is up again", self._name)
        self._settle()

    def _settle(self) -> None:
        self.clear = self.serving
