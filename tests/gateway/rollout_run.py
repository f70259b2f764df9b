"""A rollout by hand: what happened goes in, the actions of the transition come out."""

from __future__ import annotations

from typing import Any

from gateway.fleet.judge import Verdict
from gateway.fleet.rollout import Options, Refusal, Rollout, Version, command, fact
from gateway.fleet.rollout import events as e

OLD, NEW = Version(source="old.gguf"), Version(source="new.gguf", worker={"max_num_seqs": 8})
PASS, HOLD, FAIL = (
    Verdict(outcome=outcome, reason=f"it is {outcome}") for outcome in ("pass", "hold", "fail")
)


class Run:
    """One rollout and the actions of its last transition."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        asked = e.Start(id="r1", model="m", old=OLD, new=NEW, options=Options(**options))
        answer = command(None, asked, self.now)
        assert not isinstance(answer, Refusal), answer
        self.rollout: Rollout = answer[0]
        self.actions: tuple[e.Action, ...] = answer[1]

    def tell(self, kind: type[e.Fact], **values: Any) -> None:
        self.rollout, self.actions = fact(self.rollout, kind(rollout_id="r1", **values), self.now)

    def ask(self, asked: e.Command) -> None:
        answer = command(self.rollout, asked, self.now)
        assert not isinstance(answer, Refusal), answer
        self.rollout, self.actions = answer

    def refused(self, asked: e.Command) -> Refusal:
        answer = command(self.rollout, asked, self.now)
        assert isinstance(answer, Refusal)
        return answer

    def prove(self) -> None:
        for kind in (e.StandbyReady, e.IdentityConfirmed, e.WarmedUp, e.GoldenPassed):
            self.tell(kind)

    def applied(self) -> None:
        self.tell(e.Applied, change=self.rollout.change)

    def judged(self, verdict: Verdict, after: float = 0) -> None:
        self.now += after
        self.tell(e.Judged, change=self.rollout.change, verdict=verdict)

    def leave(self, side: Any) -> None:
        self.tell(e.BarrierReached, change=self.rollout.change)
        assert self.actions == (e.Drain(side=side),)
        self.tell(e.Drained, side=side)
        assert self.actions == (e.Stop(side=side),)
        self.tell(e.Stopped, side=side)
