"""What follows from what has happened. Total: what doesn't belong to the present phase changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.fleet.judge import Verdict, crashed
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import Outcome, Phase, Rollout
from gateway.fleet.rollout.moves import (
    LADDER,
    PROVE_WITHIN,
    Step,
    actions_of,
    again,
    enter,
    go_on,
    ignore,
    next_step,
    note,
    revert,
    roll_back,
    stopped,
)
from gateway.fleet.state import FULL_WEIGHT

_LEAVING: tuple[Phase, ...] = ("clearing", "draining", "cutting")
UNSTEADY = 3  # crashes of the old version on one step, after which it is no measure
_NO_MEASURE = (
    f"the old version has crashed {UNSTEADY} times or more on this step, so it is no measure: "
    "`promote` goes on with the new one, `abort` goes back"
)


def _climb(at: Phase, to: Phase, what: str) -> Callable[[Rollout, e.Fact, float], Step]:
    def rung(rollout: Rollout, fact: e.Fact, now: float) -> Step:
        return enter(rollout, to, now, what) if rollout.phase == at else ignore(rollout)

    return rung


def _standby_failed(rollout: Rollout, fact: e.StandbyFailed, now: float) -> Step:
    """One that doesn't even start was never a canary: the rollout has failed. Later it is as a crash."""
    if rollout.phase == "starting":
        outcome: Outcome = "rolled_back" if rollout.recreate else "failed"
        return roll_back(rollout, outcome, now, f"the standby didn't start: {fact.reason}")
    return _standby_ended(rollout, now, f"the standby failed: {fact.reason}")


def _standby_crashed(rollout: Rollout, fact: e.StandbyCrashed, now: float) -> Step:
    if rollout.phase == "judging":
        verdicts = {**rollout.verdicts, rollout.step_name: crashed(rollout.verdicts.get(rollout.step_name))}
        rollout = msgspec.structs.replace(rollout, verdicts=verdicts)
    return _standby_ended(rollout, now, f"the standby crashed: {fact.reason}")


def _standby_ended(rollout: Rollout, now: float, what: str) -> Step:
    if rollout.leaving == "standby" and rollout.phase in _LEAVING:
        return enter(rollout, "stopping", now, what)
    on_its_own = rollout.phase == "clearing" and not rollout.recreate  # the old version isn't fenced yet
    if on_its_own or rollout.phase in (*LADDER, "shifting", "judging"):
        return roll_back(rollout, "rolled_back", now, what)
    return note(rollout, now, what)


def _golden_failed(rollout: Rollout, fact: e.GoldenFailed, now: float) -> Step:
    if rollout.phase != "proving":
        return ignore(rollout)
    return roll_back(rollout, "rolled_back", now, f"a golden prompt failed: {fact.reason}")


def _applied(rollout: Rollout, fact: e.Applied, now: float) -> Step:
    if fact.change != rollout.change:
        return ignore(rollout)
    match rollout.phase:
        case "holding" if rollout.going_back or not rollout.suspended:
            return enter(rollout, "clearing", now, "requests are held")
        case "shifting" if not rollout.suspended:
            if rollout.full:
                return next_step(rollout, now, "promoted to the end")
            return enter(rollout, "judging", now, f"all gateways have {rollout.step_name}")
        case "reverting":
            return _reverted(rollout, now)
    return ignore(rollout)


def _reverted(rollout: Rollout, now: float) -> Step:
    what = "all gateways have the old version"
    if rollout.recreate and rollout.outcome is not None:  # the standby is gone already, or never was
        return enter(rollout, rollout.outcome, now, what)
    return enter(rollout, "clearing", now, what, leaving="standby")


def _judged(rollout: Rollout, fact: e.Judged, now: float) -> Step:
    if rollout.phase != "judging" or fact.change != rollout.change:
        return ignore(rollout)
    verdict = _measured_with(rollout, fact.verdict)
    verdicts = {**rollout.verdicts, rollout.step_name: verdict}
    known = rollout.verdicts.get(rollout.step_name)
    if verdict != known:  # numbers change with each verdict; only a new outcome is worth a line in the log
        revision = rollout.revision + 1
        rollout = msgspec.structs.replace(rollout, verdicts=verdicts, revision=revision)
    if verdict.outcome == "fail":
        return roll_back(rollout, "rolled_back", now, verdict.reason)
    if verdict.outcome == "pass" and now >= (rollout.due or 0) and not (rollout.paused or rollout.suspended):
        return next_step(rollout, now, f"{rollout.step_name} passed")
    if known is None or known.outcome != verdict.outcome:
        return note(rollout, now, f"{verdict.outcome}: {verdict.reason}")
    return rollout, ()


def _measured_with(rollout: Rollout, verdict: Verdict) -> Verdict:
    """By an old version that crashes all the time nothing is good; what is bad is so by itself."""
    if rollout.primary_crashes < UNSTEADY or verdict.outcome == "fail":
        return verdict
    return msgspec.structs.replace(verdict, outcome="hold", reason=_NO_MEASURE)


def _held_back(rollout: Rollout) -> bool:
    """Redis is down: gateways can't say what they have, so nothing of the old version is given up."""
    return rollout.suspended and not rollout.going_back


def _barrier(rollout: Rollout, fact: e.BarrierReached, now: float) -> Step:
    if rollout.phase != "clearing" or fact.change != rollout.change or _held_back(rollout):
        return ignore(rollout)
    return enter(rollout, "draining", now, f"no gateway has a request on the {rollout.leaving}")


def _drained(rollout: Rollout, fact: e.Drained, now: float) -> Step:
    if rollout.phase not in ("draining", "cutting") or fact.side != rollout.leaving:
        return ignore(rollout)
    what = f"the {fact.side} has no request any more"
    return enter(rollout, "stopping", now, what, cut=rollout.cut + fact.cut)


def _gone(rollout: Rollout, fact: e.Stopped, now: float) -> Step:
    expected = rollout.phase == "stopping" and fact.side == rollout.leaving
    return stopped(rollout, now) if expected else ignore(rollout)


def _primary_crashed(rollout: Rollout, fact: e.PrimaryCrashed, now: float) -> Step:
    what = f"the primary crashed: {fact.reason}"
    if rollout.leaving == "primary" and rollout.phase in _LEAVING:
        return enter(rollout, "stopping", now, what)
    if rollout.phase == "judging" and rollout.standby_bp < FULL_WEIGHT:  # its numbers are no measure now
        crashes = rollout.primary_crashes + 1
        if crashes < UNSTEADY:
            return again(rollout, now, what, primary_crashes=crashes)
        if crashes == UNSTEADY:
            return note(rollout, now, f"{what}; {_NO_MEASURE}", primary_crashes=crashes)
    return note(rollout, now, what)


def _primary_ready(rollout: Rollout, fact: e.PrimaryReady, now: float) -> Step:
    if rollout.phase != "restoring":
        return ignore(rollout)
    return revert(rollout, now, "the old version is back")


def _primary_failed(rollout: Rollout, fact: e.PrimaryFailed, now: float) -> Step:
    if rollout.phase != "restoring":
        return _primary_crashed(rollout, e.PrimaryCrashed(rollout_id=rollout.id, reason=fact.reason), now)
    reason = f"{rollout.reason}; then the old version didn't start again: {fact.reason}"
    return revert(rollout, now, reason, outcome="failed", reason=reason)


def _gateway_lost(rollout: Rollout, fact: e.GatewayLost, now: float) -> Step:
    if rollout.phase in ("holding", "shifting", "reverting", "clearing"):
        return again(rollout, now, f"gateway {fact.gateway} is gone and isn't waited for")
    return ignore(rollout)


def _redis_lost(rollout: Rollout, fact: e.RedisLost, now: float) -> Step:
    if rollout.suspended:
        return ignore(rollout)
    suspended, _ = note(rollout, now, "Redis is down: nothing advances", suspended=True)
    users_wait_for_nothing = rollout.phase in ("holding", "clearing") and rollout.leaving == "primary"
    if rollout.recreate and users_wait_for_nothing and not rollout.going_back:
        return roll_back(suspended, "rolled_back", now, "Redis is down, and users would wait for it")
    return suspended, ()


def _redis_back(rollout: Rollout, fact: e.RedisBack, now: float) -> Step:
    if not rollout.suspended:
        return ignore(rollout)
    if rollout.phase == "judging":  # what was measured meanwhile counts
        return note(rollout, now, "Redis is back", suspended=False)
    return _resumed(again(rollout, now, "Redis is back", suspended=False), now)


def _restarted(rollout: Rollout, fact: e.Restarted, now: float) -> Step:
    return _resumed(again(rollout, now, "the supervisor has taken it up again"), now)


def _resumed(step: Step, now: float) -> Step:
    return go_on(step[0], now) if step[0].phase == "proven" else step


def _tick(rollout: Rollout, fact: e.Tick, now: float) -> Step:
    if rollout.due is None or now < rollout.due:
        return ignore(rollout)
    match rollout.phase:
        case "checking" | "warming" | "proving":
            reason = f"{rollout.phase} the standby took more than {PROVE_WITHIN:g} s"
            return roll_back(rollout, "rolled_back", now, reason)
        case "clearing" if not _held_back(rollout):
            return enter(rollout, "cutting", now, "the drain limit is over: streams are ended")
        case "draining":
            return enter(rollout, "cutting", now, "the drain limit is over: streams are ended")
        case "cutting":
            return enter(rollout, "stopping", now, f"the {rollout.leaving} didn't end its streams")
    return ignore(rollout)


FACTS: dict[type[e.Fact], Callable[[Rollout, Any, float], Step]] = {
    e.StandbyReady: _climb("starting", "checking", "loaded"),
    e.IdentityConfirmed: _climb("checking", "warming", "is who it should be"),
    e.WarmedUp: _climb("warming", "proving", "warm"),
    e.GoldenPassed: _climb("proving", "proven", "answers alike twice, and all golden prompts"),
    e.StandbyFailed: _standby_failed,
    e.StandbyCrashed: _standby_crashed,
    e.GoldenFailed: _golden_failed,
    e.Applied: _applied,
    e.Judged: _judged,
    e.BarrierReached: _barrier,
    e.Drained: _drained,
    e.Stopped: _gone,
    e.PrimaryCrashed: _primary_crashed,
    e.PrimaryReady: _primary_ready,
    e.PrimaryFailed: _primary_failed,
    e.GatewayLost: _gateway_lost,
    e.RedisLost: _redis_lost,
    e.RedisBack: _redis_back,
    e.Restarted: _restarted,
    e.Tick: _tick,
}


def fact(rollout: Rollout, happened: e.Fact, now: float) -> Step:
    """What follows from a fact. One of another rollout, or after the end, changes nothing."""
    if happened.rollout_id != rollout.id:
        return ignore(rollout)
    if rollout.terminal:
        return rollout, actions_of(rollout) if isinstance(happened, e.Restarted) else ()
    return FACTS[type(happened)](rollout, happened, now)
