"""A change of a running fleet, as it is told: its plan, its steps, how far they are."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.fleet.reconcile import Plan

State = Literal["waiting", "running", "done", "failed"]


class Step(msgspec.Struct, kw_only=True):
    """One thing that is done; `detail`: how far it is, or what came of it."""

    name: str
    state: State = "waiting"
    detail: str = ""

    def say(self, detail: str) -> None:
        self.detail = detail


class Applying(msgspec.Struct, kw_only=True):
    """A way from one fleet file to another; `state`: of the whole; `rolled_back`: a rollout was. Unix
    times."""

    plan: Plan
    steps: list[Step]
    started: float
    state: State = "running"
    rolled_back: bool = False
    ended: float | None = None


class StepFailed(Exception):
    """What a step couldn't do."""
