"""Rollouts in a small world: gateways that lag and die, workers that crash, a supervisor that restarts.

Hypothesis picks the schedule. Facts are true here, as a supervisor would observe them, and what counts is
what happens to requests: none may be claimed for a worker that is gone, and none may be on a worker that is
stopped, except streams that outlived the drain limit.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.fleet.judge import Verdict
from gateway.fleet.rollout import Options, Refusal, Rollout, Version, command, decode, encode, fact
from gateway.fleet.rollout import events as e

OLD, NEW = Version(source="old"), Version(source="new")
GATEWAYS = 3
SIDES = ("primary", "standby")


class Gateway:
    def __init__(self, weights: e.SetWeights) -> None:
        self.weights = weights
        self.inflight = {"primary": 0, "standby": 0}
        self.queued = 0


class Fleet(RuleBasedStateMachine):
    """The supervisor's part is `tell`, `perform` and `observe`; the rest is the world."""

    @initialize(
        strategy=st.sampled_from(["canary", "recreate"]),
        steps=st.sampled_from([(100,), (5, 50, 100)]),
        rounds=st.integers(0, 24),
    )
    def start(self, strategy: Any, steps: tuple[float, ...], rounds: int) -> None:
        self.now = 0.0
        self.published = e.SetWeights(change=0, primary_bp=10_000, standby_bp=0)
        self.gateways = [Gateway(self.published) for _ in range(GATEWAYS)]
        self.workers = {"primary": "up", "standby": "none"}  # none | up | fenced | crashed | gone
        self.redis = True
        self.overdue: set[str] = set()  # had requests in flight beyond the drain limit
        self.todo: list[e.Action] = []
        self.on_disk = b""
        options = Options(strategy=strategy, steps=steps, hold=5, drain_limit=50)
        self.take(command(None, e.Start(id="r", model="m", old=OLD, new=NEW, options=options), self.now))
        for i in range(GATEWAYS):
            self.request(i, 0)
        self.nothing_happens(rounds)

    # --- the supervisor

    def take(self, answer: Any) -> None:
        """State to the disk first, then to the actions."""
        if isinstance(answer, Refusal):
            return
        rollout, actions = answer
        self.rollout: Rollout = rollout
        self.on_disk = encode(rollout)
        self.todo += actions
        if rollout.phase == "cutting":
            self.overdue.add(str(rollout.leaving))

    def tell(self, kind: type[e.Fact], **values: Any) -> None:
        self.take(fact(self.rollout, kind(rollout_id="r", **values), self.now))

    @precondition(lambda self: self.todo)
    @rule()
    def perform(self) -> None:
        action = self.todo.pop(0)
        match action:
            case e.SetWeights() if action.change >= self.published.change:
                self.published = action
            case e.StartStandby() if self.workers["standby"] == "none":
                self.workers["standby"] = "up"
            case e.RestorePrimary() if self.workers["primary"] in ("gone", "crashed"):
                self.workers["primary"] = "up"
            case e.Drain(side=side) if self.workers[side] == "up":
                self.workers[side] = "fenced"
            case e.CutStreams(side=side):
                self.end_streams(side)
            case e.Stop(side=side):
                assert self.on(side) == 0 or side in self.overdue, "requests on a stopped worker"
                self.workers[side] = "gone"
                self.end_streams(side)

    @rule()
    def crash(self) -> None:
        """Kill -9, at any point between two actions, and the successor."""
        self.todo = []
        self.rollout = decode(self.on_disk)
        self.tell(e.Restarted)

    @rule()
    def observe(self) -> None:
        """Reports one thing that is true and that the present phase waits for."""
        r, side = self.rollout, self.rollout.leaving or "standby"
        applied = self.redis and all(g.weights.change == r.change for g in self.gateways)
        match r.phase:
            case "starting" if self.workers["standby"] == "up":
                self.tell(e.StandbyReady)
            case "checking":
                self.tell(e.IdentityConfirmed)
            case "warming":
                self.tell(e.WarmedUp)
            case "holding" | "shifting" | "reverting" if applied:
                self.tell(e.Applied, change=r.change)
            case "clearing" if applied and self.on(side) == 0:
                self.tell(e.BarrierReached, change=r.change)
            case "draining" | "cutting" if self.workers[side] != "up" and self.on(side) == 0:
                self.tell(e.Drained, side=side)
            case "stopping" if self.workers[side] == "gone":
                self.tell(e.Stopped, side=side)
            case "restoring" if self.workers["primary"] == "up":
                self.tell(e.PrimaryReady)

    @rule(outcome=st.sampled_from(["pass", "pass", "pass", "hold", "fail"]))
    def judge(self, outcome: Any) -> None:
        if self.rollout.phase == "proving" and outcome != "hold":
            self.tell(e.GoldenPassed if outcome == "pass" else e.GoldenFailed)
        elif self.rollout.phase == "judging":
            self.tell(e.Judged, change=self.rollout.change, verdict=Verdict(outcome=outcome, reason=outcome))

    @rule(asked=st.sampled_from([e.Pause(), e.Resume(), e.Promote(), e.Promote(full=True), e.Abort()]))
    def command(self, asked: e.Command) -> None:
        self.take(command(self.rollout, asked, self.now))

    @rule(seconds=st.sampled_from([1, 10, 60]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.tell(e.Tick)

    # --- the world

    def on(self, side: str) -> int:
        return sum(gateway.inflight[side] for gateway in self.gateways)

    @rule(i=st.integers(0, GATEWAYS - 1))
    def gateway_reads(self, i: int) -> None:
        """It lags until it is its turn."""
        self.gateways[i].weights = self.published

    @rule(i=st.integers(0, GATEWAYS - 1), bucket=st.integers(0, 9999))
    def request(self, i: int, bucket: int) -> None:
        gateway = self.gateways[i]
        if gateway.weights.hold:
            gateway.queued += 1
            return
        side = "standby" if bucket < gateway.weights.standby_bp else "primary"
        state = self.workers[side]
        assert state in ("up", "crashed", "fenced"), f"{side} gets a request and is {state}"
        if state == "up":  # a fenced one refuses, and the request goes elsewhere
            gateway.inflight[side] += 1

    @rule(i=st.integers(0, GATEWAYS - 1), side=st.sampled_from(SIDES))
    def request_ends(self, i: int, side: str) -> None:
        self.gateways[i].inflight[side] = max(0, self.gateways[i].inflight[side] - 1)

    @rule(i=st.integers(0, GATEWAYS - 1))
    def gateway_dies(self, i: int) -> None:
        """Its successor begins with what is published; its connections are gone."""
        self.gateways[i] = Gateway(self.published)
        self.tell(e.GatewayLost, gateway=f"gateway-{i}")

    @precondition(lambda self: self.workers["standby"] == "up")
    @rule()
    def standby_crashes(self) -> None:
        self.worker_crashes("standby")
        self.tell(e.StandbyCrashed, reason="SIGSEGV")
        if not self.rollout.going_back:  # past the return: supervision starts it again
            self.workers["standby"] = "up"

    @precondition(lambda self: self.workers["primary"] in ("up", "fenced"))
    @rule()
    def primary_crashes(self) -> None:
        self.worker_crashes("primary")
        self.tell(e.PrimaryCrashed, reason="SIGSEGV")
        if self.rollout.phase not in ("draining", "cutting", "stopping") or self.rollout.leaving != "primary":
            self.workers["primary"] = "up"

    def worker_crashes(self, side: str) -> None:
        self.workers[side] = "crashed"
        self.end_streams(side)

    def end_streams(self, side: str) -> None:
        for gateway in self.gateways:
            gateway.inflight[side] = 0

    @rule()
    def redis_fails_or_returns(self) -> None:
        self.redis = not self.redis
        self.tell(e.RedisBack if self.redis else e.RedisLost)

    @rule(rounds=st.integers(1, 6))
    def nothing_happens(self, rounds: int) -> None:
        """For a while all goes well, so that schedules get far; requests in flight stay."""
        for _ in range(rounds):
            while self.todo:
                self.perform()
            for gateway in self.gateways:
                gateway.weights = self.published
            self.wait(1)
            self.judge("pass")
            self.observe()

    # --- what holds at any time

    @invariant()
    def somebody_serves(self) -> None:
        """By what is published: a version with weight is there, and never both are without."""
        weights = self.published
        assert weights.hold or weights.primary_bp + weights.standby_bp == 10_000
        for side, weight in zip(SIDES, (weights.primary_bp, weights.standby_bp)):
            assert not weight or self.workers[side] in ("up", "crashed"), f"{side} has weight"

    @invariant()
    def kept_is_what_is(self) -> None:
        assert decode(self.on_disk) == self.rollout

    def teardown(self) -> None:
        """From wherever the schedule left it, a world without further mishaps brings it to an end."""
        if not hasattr(self, "rollout"):
            return
        if not self.redis:
            self.redis_fails_or_returns()
        self.command(e.Resume())
        self.crash()
        for _ in range(200):
            if self.rollout.terminal and not self.todo:
                break
            while self.todo:
                self.perform()
            for gateway in self.gateways:
                gateway.weights = self.published
                gateway.inflight = {"primary": 0, "standby": 0}
            self.wait(10)
            self.judge("pass")
            self.observe()
            self.somebody_serves()
        assert self.rollout.terminal, self.rollout
        survivor = "standby" if self.rollout.phase == "completed" else "primary"
        assert self.workers[survivor] == "up"
        other = "primary" if survivor == "standby" else "standby"
        assert self.workers[other] in ("gone", "none")


TestSchedules = Fleet.TestCase
TestSchedules.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
