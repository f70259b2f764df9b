"""A rollout's processes when a supervisor starts: which sides run, and whether a standby was lost."""

from __future__ import annotations

from gateway.fleet.rollout import Rollout

_FENCED = ("draining", "cutting", "stopping")


def primary_runs(rollout: Rollout) -> bool:
    """Whether the old version is to be started, or found, before the rollout goes on."""
    if not rollout.recreate:
        return not (rollout.leaving == "primary" and rollout.phase in _FENCED)
    if rollout.phase == "reverting":
        return True
    return rollout.leaving == "primary" and rollout.phase in ("holding", "clearing")


def standby_runs(rollout: Rollout) -> bool:
    """Whether the new version is to be started, or found: it is the only one from the return on."""
    return rollout.past_return


def standby_was_there(rollout: Rollout) -> bool:
    """Whether it had a standby whose end, with the supervisor, ends it; one in `starting` starts again."""
    if rollout.past_return or rollout.phase in ("starting", "restoring"):
        return False
    if rollout.recreate:
        return rollout.leaving != "primary" and rollout.phase != "reverting"
    return True
