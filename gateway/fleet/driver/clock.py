"""Time as rollouts count it: no user's stream is cut, and no step is over, because somebody sets a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.fleet.reaper import boot_id
from gateway.fleet.rollout.model import Clock


def clock_now() -> Clock:
    """The machine's clock as it is set now."""
    return Clock(boot=boot_id(), offset=time.time() - time.monotonic())


def steady(clock: Clock | None) -> Callable[[], float]:
    """Unix time by the clock as it was set then, whatever it is set to since; over the ends of processes, not
    of the machine, after which its present time counts."""
    now = clock_now()
    offset = clock.offset if clock is not None and clock.boot == now.boot else now.offset
    return lambda: offset + time.monotonic()
