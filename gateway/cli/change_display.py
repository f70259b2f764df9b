"""How a change of the fleet file looks while it is carried out."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gateway.fleet.steps import Applying, Step

_LINGERS = 60.0  # seconds that a change is shown after its end


class News:
    """Of one change after another: what each step has come to since the last look."""

    def __init__(self) -> None:
        self._said: dict[tuple[float, str], Step] = {}

    def lines(self, change: Applying) -> Iterator[str]:
        for step in change.steps:
            key = change.started, step.name
            if step.state != "waiting" and step != self._said.get(key):
                self._said[key] = step
                yield step_line(step)


def step_line(step: Step) -> str:
    """``12:00:01 m is swapped: judging at 5%``"""
    return f"{time.strftime('%H:%M:%S')} {_words(step)}"


def is_news(change: Applying | None) -> bool:
    """Whether it goes on, or did until just now."""
    return change is not None and (change.ended is None or time.time() - change.ended < _LINGERS)


def summary(change: Applying | None) -> Iterator[str]:
    """A line for each step that isn't waiting, while the change is news."""
    if change is not None and is_news(change):
        over = sum(step.state in ("done", "failed") for step in change.steps)
        yield f"config apply: {change.state}, {over} of {len(change.steps)} steps"
        for step in change.steps:
            if step.state in ("running", "failed"):
                yield f"  {_words(step)}"


def _words(step: Step) -> str:
    state = "" if step.state == "running" else f": {step.state}"
    return f"{step.name}{state}" + (f": {step.detail}" if step.detail else "")
