"""What happens to a rollout (commands, facts) and what it wants done (actions)."""

from __future__ import annotations

import msgspec

from gateway.fleet.judge import Verdict
from gateway.fleet.rollout.model import Options, Outcome, Record, Side, Version

# --- commands


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody asks for something. It is done or refused, at once."""


class Start(Command, frozen=True, kw_only=True, tag=True):
    """`misfit`: why both versions don't fit into memory together, in the ledger's words; None if they do."""

    id: str
    model: str
    old: Version
    new: Version
    options: Options = Options()
    misfit: str | None = None


class Pause(Command, frozen=True, tag=True): ...


class Resume(Command, frozen=True, tag=True): ...


class Promote(Command, frozen=True, kw_only=True, tag=True):
    """To the next step, whatever the judge says; `full`: to the end, without judging."""

    full: bool = False


class Abort(Command, frozen=True, tag=True): ...


class Undo(Command, frozen=True, kw_only=True, tag=True):
    """A new rollout back to the version before the last one that was completed, which need not be the last of
    all. `misfit`: as for Start."""

    id: str
    misfit: str | None = None
    completed: Record | None = None


# --- facts


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something has happened in the world. Facts of another rollout are stale and change nothing."""

    rollout_id: str


class StandbyReady(Fact, frozen=True, tag=True):
    """Started and loaded."""


class StandbyFailed(Fact, frozen=True, kw_only=True, tag=True):
    """It can't be started, isn't who it should be, or didn't survive warming up."""

    reason: str = ""


class StandbyCrashed(Fact, frozen=True, kw_only=True, tag=True):
    reason: str = ""


class IdentityConfirmed(Fact, frozen=True, tag=True):
    """Slot and generation are those of the process that was started."""


class WarmedUp(Fact, frozen=True, tag=True): ...


class GoldenPassed(Fact, frozen=True, tag=True): ...


class GoldenFailed(Fact, frozen=True, kw_only=True, tag=True):
    reason: str = ""


class Applied(Fact, frozen=True, kw_only=True, tag=True):
    """All living gateways have the weights of that change."""

    change: int


class Judged(Fact, frozen=True, kw_only=True, tag=True):
    """A verdict on the interval since the weights of that change were applied."""

    change: int
    verdict: Verdict


class BarrierReached(Fact, frozen=True, kw_only=True, tag=True):
    """All living gateways have the weights of that change and count no request on the side that leaves."""

    change: int


class Drained(Fact, frozen=True, kw_only=True, tag=True):
    """The worker itself, fenced, has no request any more. `cut`: streams that were ended for that."""

    side: Side
    cut: int = 0


class Stopped(Fact, frozen=True, kw_only=True, tag=True):
    """All its processes are gone and the card's memory is back."""

    side: Side


class PrimaryCrashed(Fact, frozen=True, kw_only=True, tag=True):
    """Its supervision starts it again, unless it has been told to drain or to stop."""

    reason: str = ""


class PrimaryReady(Fact, frozen=True, tag=True):
    """The old version, started again, is ready and proven."""


class PrimaryFailed(Fact, frozen=True, kw_only=True, tag=True):
    """The old version can't be started again."""

    reason: str = ""


class GatewayLost(Fact, frozen=True, kw_only=True, tag=True):
    """A gateway's process is dead or its sign of life too old: nobody waits for it any more."""

    gateway: str = ""


class RedisLost(Fact, frozen=True, tag=True): ...


class RedisBack(Fact, frozen=True, tag=True): ...


class Restarted(Fact, frozen=True, tag=True):
    """The supervisor has taken the rollout up again after its own end."""


class Tick(Fact, frozen=True, tag=True):
    """Time has passed. At least one a second."""


# --- actions


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """To be done after the new state is on disk. May be asked for again at any time: done is done."""


class StartStandby(Action, frozen=True, tag=True):
    """Start a process of the new version, or find the one that runs. → StandbyReady, StandbyFailed.

    From here on its end is reported (StandbyCrashed), not repaired.
    """


class CheckIdentity(Action, frozen=True, tag=True):
    """→ IdentityConfirmed, StandbyFailed."""


class WarmUp(Action, frozen=True, tag=True):
    """→ WarmedUp, StandbyFailed."""


class RunGolden(Action, frozen=True, tag=True):
    """→ GoldenPassed, GoldenFailed."""


class SetWeights(Action, frozen=True, kw_only=True, tag=True):
    """Write the routes document; the standby's targets come last in it, with `rollout_id` and a salt of it.

    `hold`: gateways keep requests waiting instead of refusing them. → Applied, as soon as all have it.
    """

    change: int
    primary_bp: int
    standby_bp: int
    hold: bool = False


class Judge(Action, frozen=True, kw_only=True, tag=True):
    """Begin an interval now and report a verdict on it once a second or so. → Judged."""

    change: int


class AwaitBarrier(Action, frozen=True, kw_only=True, tag=True):
    """→ BarrierReached."""

    change: int
    side: Side


class Drain(Action, frozen=True, kw_only=True, tag=True):
    """Tell the worker to refuse and to finish. → Drained, also when its process is gone.

    From here on its end is no crash, and nobody starts it again.
    """

    side: Side


class CutStreams(Action, frozen=True, kw_only=True, tag=True):
    """End what the worker still has with an error. → Drained."""

    side: Side


class Stop(Action, frozen=True, kw_only=True, tag=True):
    """TERM, KILL of the group, wait for memory. → Stopped, also when there was nothing.

    What it still has in flight has outlived the drain limit; it counts as cut.
    """

    side: Side


class RestorePrimary(Action, frozen=True, tag=True):
    """Start the old version again, prove it. → PrimaryReady, PrimaryFailed (supervision goes on trying)."""


class Finish(Action, frozen=True, kw_only=True, tag=True):
    """It is over. Completed: the new version is the model's primary, under supervision, and on record.

    Else the old one is. Append the history record.
    """

    outcome: Outcome
