"""The operator's commands: each is done or refused, in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.fleet.errors import EXIT_CONFLICT, EXIT_DEGRADED, EXIT_INVALID, EXIT_MISFIT
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import Entry, Options, Rollout, Version
from gateway.fleet.rollout.moves import (
    Step,
    actions_of,
    go_on,
    ignore,
    next_step,
    note,
    roll_back,
)


class Refusal(msgspec.Struct, frozen=True):
    """Why nothing was done, and the exit code of the command line for it."""

    reason: str
    exit_code: int = EXIT_CONFLICT


def no_rollout(model: str = "the model") -> str:
    """What is said of one that never had a rollout."""
    return f"there was no rollout of {model}; `pagefleet swap start` begins one"


def start(rollout: Rollout | None, asked: e.Start, now: float) -> Step | Refusal:
    if rollout is not None and not rollout.terminal:
        return Refusal(
            f"rollout {rollout.id} of {rollout.model} is under way ({rollout.phase}); "
            "`pagefleet swap watch` shows it, `abort` ends it"
        )
    problems = asked.options.problems()
    if problems:
        return Refusal("; ".join(problems), EXIT_INVALID)
    return _begin(asked.id, asked.model, asked.old, asked.new, asked.options, asked.misfit, now)


def undo(rollout: Rollout | None, asked: e.Undo, now: float) -> Step | Refusal:
    if rollout is None:
        return Refusal(no_rollout())
    if not rollout.terminal:
        return Refusal(f"rollout {rollout.id} isn't over; `abort` ends it")
    undone = asked.completed
    if undone is None:
        return Refusal(
            f"nothing to undo: no rollout of {rollout.model} has changed anything; "
            f"the last one, {rollout.id}, was {rollout.phase.replace('_', ' ')}"
        )
    options = msgspec.structs.replace(undone.options, steps=(100.0,))
    return _begin(
        asked.id, rollout.model, undone.new, undone.old, options, asked.misfit, now, why="undo", full=True
    )


def _begin(
    id: str,
    model: str,
    old: Version,
    new: Version,
    options: Options,
    misfit: str | None,
    now: float,
    why: str = "start",
    full: bool = False,
) -> Step | Refusal:
    """An undo goes straight to the end: that version has served users before."""
    if misfit and options.strategy == "canary":
        return Refusal(
            f"{misfit}; `--strategy recreate` stops the old version first, while users wait", EXIT_MISFIT
        )
    recreate = options.strategy == "recreate"
    begun = Rollout(
        id=id,
        model=model,
        old=old,
        new=new,
        options=options,
        started=now,
        full=full,
        revision=1,
        phase="holding" if recreate else "starting",
        primary_bp=0 if recreate else 10_000,
        hold=recreate,
        change=1 if recreate else 0,
        leaving="primary" if recreate else None,
    )
    begun = msgspec.structs.replace(begun, log=(Entry(now, begun.phase, f"{why}: to {new.source}"),))
    return begun, actions_of(begun)


def pause(rollout: Rollout, asked: e.Pause, now: float) -> Step | Refusal:
    if rollout.going_back:
        return Refusal("the rollout is going back, which can't be paused")
    if rollout.leaving == "primary":
        return Refusal("the old version is being stopped, which can't be paused; `abort` or wait")
    if rollout.recreate and rollout.phase != "judging":
        return Refusal("users' requests are waiting, so this can't be paused; `abort` or wait")
    if rollout.paused:
        return ignore(rollout)
    return note(rollout, now, "paused", paused=True)


def resume(rollout: Rollout, asked: e.Resume, now: float) -> Step | Refusal:
    if not rollout.paused:
        return ignore(rollout)
    resumed, _ = note(rollout, now, "resumed", paused=False)
    return go_on(resumed, now)


def promote(rollout: Rollout, asked: e.Promote, now: float) -> Step | Refusal:
    if rollout.going_back:
        return Refusal(f"the rollout is going back ({rollout.reason}); start another one")
    if rollout.leaving == "primary":
        return Refusal("the old version is being stopped already; nothing is left to promote")
    if rollout.suspended:
        return Refusal("Redis is down: no rollout advances until it is back", EXIT_DEGRADED)
    if asked.full:
        promoted, _ = note(rollout, now, "promoted to the end", full=True, paused=False)
        if promoted.phase == "judging":
            return next_step(promoted, now, "promoted to the end")
        return go_on(promoted, now)
    if rollout.phase == "proven":
        moved, actions = go_on(msgspec.structs.replace(rollout, paused=False), now)
        return msgspec.structs.replace(moved, paused=rollout.paused), actions
    if rollout.phase == "judging":
        return next_step(rollout, now, f"promoted from {rollout.step_name}")
    if rollout.phase == "shifting":
        return Refusal("the weights of the present step are still on their way to the gateways; try again")
    return Refusal(f"the standby isn't proven yet ({rollout.phase}); `promote --full` promotes it when it is")


def abort(rollout: Rollout, asked: e.Abort, now: float) -> Step | Refusal:
    if rollout.going_back:
        return ignore(rollout)
    if rollout.past_return:
        return Refusal("too late: the old version takes no requests any more; wait, then `undo`")
    return roll_back(rollout, "aborted", now, "aborted by the operator")


_OF_A_RUNNING_ONE: dict[type[e.Command], Callable[[Rollout, Any, float], Step | Refusal]] = {
    e.Pause: pause,
    e.Resume: resume,
    e.Promote: promote,
    e.Abort: abort,
}


def command(rollout: Rollout | None, asked: e.Command, now: float) -> Step | Refusal:
    """The state after a command and what is to be done, or why not. None: the model never had a rollout."""
    if isinstance(asked, e.Start):
        return start(rollout, asked, now)
    if isinstance(asked, e.Undo):
        return undo(rollout, asked, now)
    if rollout is None:
        return Refusal(no_rollout())
    if rollout.terminal:
        way_out = "; `undo` goes back" if rollout.phase == "completed" else ""
        return Refusal(f"rollout {rollout.id} is over ({rollout.phase}){way_out}")
    return _OF_A_RUNNING_ONE[type(asked)](rollout, asked, now)
