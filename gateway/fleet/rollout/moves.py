"""What a transition is made of: into a phase, with new weights, onwards, back. Whoever calls knows when."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import (
    LOG_LENGTH,
    TERMINAL,
    Entry,
    Outcome,
    Phase,
    Rollout,
    Side,
)
from gateway.fleet.state import FULL_WEIGHT

PROVE_WITHIN = 600.0  # seconds that each part of the proof may take
CUT_WITHIN = 30.0  # seconds that a worker may take to end its streams when told to

Step = tuple[Rollout, tuple[e.Action, ...]]
LADDER: tuple[Phase, ...] = ("starting", "checking", "warming", "proving", "proven")


def actions_of(rollout: Rollout) -> tuple[e.Action, ...]:
    """What the present phase wants done; the same again after a restart of the supervisor."""
    side: Side = rollout.leaving or "standby"
    weights = e.SetWeights(
        change=rollout.change,
        primary_bp=rollout.primary_bp,
        standby_bp=rollout.standby_bp,
        hold=rollout.hold,
    )
    match rollout.phase:
        case "starting":
            return (e.StartStandby(),)
        case "checking":
            return (e.CheckIdentity(),)
        case "warming":
            return (e.WarmUp(),)
        case "proving":
            return (e.RunGolden(),)
        case "holding" | "shifting" | "reverting":
            return (weights,)
        case "judging":
            return (weights, e.Judge(change=rollout.change))
        case "clearing":
            return (weights, e.AwaitBarrier(change=rollout.change, side=side))
        case "draining":
            return (e.Drain(side=side),)
        case "cutting":
            return (e.Drain(side=side), e.CutStreams(side=side))
        case "stopping":
            return (e.Stop(side=side),)
        case "restoring":
            return (e.RestorePrimary(),)
        case "completed" | "rolled_back" | "aborted" | "failed":
            return (e.Finish(outcome=rollout.phase),)
        case _:  # proven
            return ()


def _log(rollout: Rollout, now: float, what: str, **changes: Any) -> Rollout:
    phase = changes.get("phase", rollout.phase)
    log = (*rollout.log, Entry(now, phase, what))[-LOG_LENGTH:]
    return msgspec.structs.replace(rollout, log=log, revision=rollout.revision + 1, **changes)


def note(rollout: Rollout, now: float, what: str, **changes: Any) -> Step:
    """Changes that start nothing."""
    return _log(rollout, now, what, **changes), ()


def ignore(rollout: Rollout) -> Step:
    return rollout, ()


def again(rollout: Rollout, now: float, what: str, **changes: Any) -> Step:
    """The same phase from its beginning, a step's interval too. Users in flight get no more time by that, and
    none from a clock that was set back while nobody looked."""
    due = _limit(rollout, now)
    if due is None and rollout.due is not None:
        due = min(rollout.due, now + rollout.options.drain_limit)
    rollout = _log(rollout, now, what, **changes, due=due)
    return rollout, actions_of(rollout)


def _limit(rollout: Rollout, now: float) -> float | None:
    """When the present phase's time is over; None: it has no time of its own."""
    match rollout.phase:
        case "checking" | "warming" | "proving":
            return now + PROVE_WITHIN
        case "judging":
            return now + rollout.options.hold
        case "cutting":
            return now + CUT_WITHIN
    return None


def enter(rollout: Rollout, phase: Phase, now: float, what: str, **changes: Any) -> Step:
    """Into another phase. The drain has one time limit from clearing on."""
    if phase in TERMINAL:
        changes |= {"outcome": phase, "ended": now, "paused": False, "suspended": False}
    entered = _log(rollout, now, what, phase=phase, **changes)
    due = _limit(entered, now)
    if phase == "clearing":
        due = now + rollout.options.drain_limit
    elif phase == "draining":
        due = rollout.due
    rollout = msgspec.structs.replace(entered, due=due)
    if phase == "proven":
        return go_on(rollout, now)
    return rollout, actions_of(rollout)


def _set_weights(
    rollout: Rollout, phase: Phase, now: float, what: str, percent: float, **changes: Any
) -> Step:
    """Into a phase that begins with new weights: `percent` for the standby, the rest for the primary."""
    standby = round(percent * FULL_WEIGHT / 100)
    weights = {"primary_bp": FULL_WEIGHT - standby, "standby_bp": standby, "hold": False}
    changes = {"change": rollout.change + 1, "leaving": None, "primary_crashes": 0, **weights, **changes}
    return enter(rollout, phase, now, what, **changes)


def hold_requests(rollout: Rollout, side: Side, now: float, what: str, **changes: Any) -> Step:
    """Recreate, before either version stops: none has weight, users wait in the gateways' queues."""
    changes |= {"primary_bp": 0, "standby_bp": 0, "hold": True, "leaving": side}
    return _set_weights(rollout, "holding", now, what, 0, **changes)


def to_step(rollout: Rollout, step: int, now: float, why: str) -> Step:
    percent = rollout.steps[step]
    return _set_weights(rollout, "shifting", now, f"{why}: {percent:g}% of users", percent, step=step)


def revert(rollout: Rollout, now: float, what: str, **changes: Any) -> Step:
    return _set_weights(rollout, "reverting", now, what, 0, **changes)


def go_on(rollout: Rollout, now: float) -> Step:
    """From proven to the first step, unless something holds it back. Never while users wait for it."""
    waits = not rollout.recreate and (rollout.suspended or rollout.paused)
    if rollout.phase != "proven" or waits:
        return ignore(rollout)
    return to_step(rollout, len(rollout.steps) - 1 if rollout.full else 0, now, "proven")


def next_step(rollout: Rollout, now: float, why: str) -> Step:
    """From one step to the next, or to the end of the old version."""
    if not rollout.last_step:
        return to_step(rollout, len(rollout.steps) - 1 if rollout.full else rollout.step + 1, now, why)
    if rollout.recreate:
        return enter(rollout, "completed", now, why, reason=why)
    what = f"{why}: the old version leaves"
    return enter(rollout, "clearing", now, what, leaving="primary", paused=False)


def roll_back(rollout: Rollout, outcome: Outcome, now: float, reason: str) -> Step:
    """Back to the old version from wherever it is; `outcome` is how that ends. Not past the return."""
    decided = {"outcome": outcome, "reason": reason, "paused": False, "full": False}
    if rollout.recreate:
        return _roll_back_recreate(rollout, now, reason, decided)
    if rollout.standby_bp:
        return revert(rollout, now, reason, **decided)
    return enter(rollout, "stopping", now, reason, leaving="standby", **decided)


def _roll_back_recreate(rollout: Rollout, now: float, reason: str, decided: dict[str, Any]) -> Step:
    if rollout.phase in ("holding", "clearing"):  # the old version isn't fenced yet
        return revert(rollout, now, reason, **decided)
    if rollout.phase in ("draining", "cutting", "stopping"):  # it is: let it end, then start it again
        return note(rollout, now, reason, **decided)
    if rollout.phase in LADDER:
        return enter(rollout, "stopping", now, reason, leaving="standby", **decided)
    return hold_requests(rollout, "standby", now, reason, **decided)


def stopped(rollout: Rollout, now: float) -> Step:
    what = f"the {rollout.leaving} is gone"
    if rollout.recreate and rollout.going_back:
        return enter(rollout, "restoring", now, what, leaving=None)
    if rollout.recreate:
        return enter(rollout, "starting", now, what, leaving=None)
    outcome = rollout.outcome if rollout.outcome is not None else "completed"
    reason = rollout.reason or "all users are on the new version"
    return enter(rollout, outcome, now, what, leaving=None, reason=reason)
