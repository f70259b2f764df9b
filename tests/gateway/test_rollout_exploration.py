"""All states of a rollout that any order of commands and facts can lead to, and what must hold in each.

A breadth-first search to closure. Facts come in any order, also such as no real worker or gateway would
report; what they claim is remembered beside the rollout, and no version may be given weight, fenced or
stopped before somebody has claimed what allows it. Time is abstract: a phase's time is over or it isn't.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from gateway.fleet.judge import Verdict
from gateway.fleet.rollout import (
    Options,
    Refusal,
    Rollout,
    Version,
    actions_of,
    command,
    decode,
    encode,
    fact,
    record_of,
)
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.facts import UNSTEADY
from gateway.fleet.rollout.model import Phase
from gateway.fleet.state import FULL_WEIGHT

OLD, NEW = Version(source="old"), Version(source="new")
LATER = 1e6  # beyond every limit of time
PASS, HOLD, FAIL = (Verdict(outcome=outcome, reason=outcome) for outcome in ("pass", "hold", "fail"))
COMMANDS = (
    e.Start(id="another", model="m", old=OLD, new=NEW),
    e.Pause(),
    e.Resume(),
    e.Promote(),
    e.Promote(full=True),
    e.Abort(),
    e.Undo(id="back"),
)
SIDES: tuple[Any, ...] = ("primary", "standby")


class Claimed(NamedTuple):
    """What has been reported so far; the first five about the present weights only."""

    applied: bool = False
    clear: bool = False
    drained: bool = False
    timed_out: int = 0
    loaded: bool = False
    identified: bool = False
    warm: bool = False
    golden: bool = False
    dead: frozenset[str] = frozenset()  # just now
    used: frozenset[str] = frozenset({"primary"})  # had weight
    stopped: frozenset[str] = frozenset()


class Node(NamedTuple):
    rollout: Rollout
    claimed: Claimed


def begin(strategy: Any, steps: tuple[float, ...]) -> Rollout:
    options = Options(strategy=strategy, steps=steps, hold=10, drain_limit=100)
    begun = command(None, e.Start(id="r", model="m", old=OLD, new=NEW, options=options), 0)
    assert not isinstance(begun, Refusal)
    return begun[0]


def facts(rollout: Rollout) -> Iterator[tuple[e.Fact, float]]:
    """Everything that can be reported, current and stale, early and late."""
    r = rollout.id
    for plain in (e.StandbyReady, e.IdentityConfirmed, e.WarmedUp, e.GoldenPassed, e.PrimaryReady):
        yield plain(rollout_id=r), 0
    for failed in (e.StandbyFailed, e.StandbyCrashed, e.GoldenFailed, e.PrimaryCrashed, e.PrimaryFailed):
        yield failed(rollout_id=r, reason="why"), 0
    for change in (rollout.change, rollout.change - 1):
        yield e.Applied(rollout_id=r, change=change), 0
        yield e.BarrierReached(rollout_id=r, change=change), 0
        for verdict in (PASS, HOLD, FAIL):
            yield e.Judged(rollout_id=r, change=change, verdict=verdict), 0
    yield e.Judged(rollout_id=r, change=rollout.change, verdict=PASS), LATER
    for side in SIDES:
        yield e.Drained(rollout_id=r, side=side), 0
        yield e.Stopped(rollout_id=r, side=side), 0
    for plain in (e.GatewayLost, e.RedisLost, e.RedisBack, e.Restarted, e.Tick):
        yield plain(rollout_id=r), 0
    yield e.Tick(rollout_id=r), LATER


def told(claimed: Claimed, rollout: Rollout, happened: e.Fact, now: float) -> Claimed:
    """What is claimed after a fact."""
    over = rollout.due is not None and now >= rollout.due
    match happened:
        case e.Applied(change=rollout.change):
            return claimed._replace(applied=True)
        case e.BarrierReached(change=rollout.change):
            return claimed._replace(clear=True)
        case e.Drained(side=rollout.leaving) if rollout.phase in ("draining", "cutting"):
            return claimed._replace(drained=True)
        case e.Tick() if over and rollout.phase in ("clearing", "draining", "cutting"):
            return claimed._replace(timed_out=min(2, claimed.timed_out + 1))
        case e.StandbyReady() if rollout.phase == "starting":
            return claimed._replace(loaded=True)
        case e.IdentityConfirmed() if claimed.loaded:
            return claimed._replace(identified=True)
        case e.WarmedUp() if claimed.identified:
            return claimed._replace(warm=True)
        case e.GoldenPassed() if claimed.warm:
            return claimed._replace(golden=True)
        case e.StandbyCrashed() | e.StandbyFailed():
            return claimed._replace(dead=frozenset({"standby"}))
        case e.PrimaryCrashed() | e.PrimaryFailed():
            return claimed._replace(dead=frozenset({"primary"}))
        case e.Stopped(side=rollout.leaving) if rollout.phase == "stopping":
            return claimed._replace(stopped=claimed.stopped | {happened.side})
        case e.PrimaryReady() if rollout.phase == "restoring":
            return claimed._replace(stopped=claimed.stopped - {"primary"})
    return claimed


def canonical(rollout: Rollout, now: float) -> Rollout:
    """Without what can't influence what follows, and with time beginning now."""
    due = None if rollout.due is None else max(0.0, rollout.due - now)
    ended = None if rollout.ended is None else 0.0
    return msgspec.structs.replace(
        rollout,
        revision=0,
        change=1,
        verdicts={},
        reason="why"[: 3 * bool(rollout.reason)],
        log=(),
        due=due,
        ended=ended,
    )


def check_weights(before: Rollout, after: Rollout, claimed: Claimed) -> Claimed:
    weights = (after.primary_bp, after.standby_bp)
    assert min(weights) >= 0
    assert sum(weights) == FULL_WEIGHT or (weights == (0, 0) and after.hold and after.recreate)
    assert not after.hold or weights == (0, 0), "requests wait though somebody could serve them"
    changed = weights != (before.primary_bp, before.standby_bp) or after.hold != before.hold
    assert after.change == before.change or after.change == before.change + 1
    assert not changed or after.change == before.change + 1, "weights without a change of their own"
    if after.standby_bp:
        assert claimed.golden, "users on a version that isn't proven"
        assert "standby" not in claimed.stopped
        claimed = claimed._replace(used=claimed.used | {"standby"})
    if after.standby_bp > before.standby_bp:
        assert not after.suspended or before.hold, "Redis is down, and nobody waits for it"
        assert not after.going_back
    if after.change != before.change:
        claimed = claimed._replace(applied=False, clear=False, drained=False, timed_out=0)
    return claimed


def check_actions(before: Rollout, after: Rollout, actions: tuple[e.Action, ...], claimed: Claimed) -> None:
    weight = {"primary": after.primary_bp, "standby": after.standby_bp}
    for action in actions:
        match action:
            case e.SetWeights():
                assert action.change == after.change
                assert (action.primary_bp, action.standby_bp, action.hold) == (*weight.values(), after.hold)
            case e.Drain(side=side):
                assert weight[side] == 0
                assert claimed.applied, "fenced before all gateways knew"
                assert claimed.clear or claimed.timed_out
            case e.CutStreams():
                assert claimed.timed_out
            case e.Stop(side=side) if before.phase != "stopping":
                assert weight[side] == 0
                never_used, gone = side not in claimed.used, side in claimed.dead
                drained = claimed.drained or claimed.timed_out > 1
                emptied = claimed.applied and (claimed.clear or claimed.timed_out) and drained
                assert never_used or gone or emptied, "stopped too early"
                if side == "primary" and before.suspended:
                    assert gone or before.phase in ("draining", "cutting")
            case e.Finish(outcome=outcome):
                assert after.phase == outcome


def check(before: Rollout, after: Rollout, actions: tuple[e.Action, ...], claimed: Claimed) -> Claimed:
    """What holds for every transition; gives what is claimed after it."""
    assert decode(encode(after)) == after
    claimed = check_weights(before, after, claimed)
    check_actions(before, after, actions, claimed)
    if after.phase != before.phase or actions:
        assert actions == actions_of(after)
    if before.going_back:
        assert after.going_back, "turned back from going back"
    assert after == before or after.revision > before.revision
    if after.terminal:
        record = record_of(after)
        assert record.exit_code == {"completed": 0, "failed": 1}.get(after.phase, 4)
        assert record.reason
        assert (after.standby_bp == FULL_WEIGHT) == (after.phase == "completed")
        assert not after.hold
        leaver = "primary" if after.phase == "completed" else "standby"
        assert leaver in claimed.stopped or (leaver == "standby" and not claimed.loaded)
    return claimed._replace(dead=frozenset())


def successors(node: Node) -> Iterator[Node]:
    before = node.rollout
    for happened, now in facts(before):
        after, actions = fact(before, happened, now)
        claimed = told(node.claimed, before, happened, now)
        claimed = check(before, after, actions, claimed)
        yield Node(canonical(after, now), claimed)
    for asked in COMMANDS:
        answer = command(before, asked, 0)
        if isinstance(answer, Refusal):
            assert answer.reason
            assert answer.exit_code in (6, 7)
            continue
        after, actions = answer
        if after.id != before.id:  # a new rollout, explored from its own beginning
            assert before.terminal
            continue
        claimed = check(before, after, actions, node.claimed)
        yield Node(canonical(after, 0), claimed)


class Graph(NamedTuple):
    """`nodes` in order of discovery; `edges[i]`: indices of those that follow."""

    nodes: list[Node]
    edges: list[set[int]]


def explore(start: Rollout) -> Graph:
    graph = Graph([], [])
    keys: dict[Any, int] = {}

    def number(node: Node) -> int:
        key = (encode(node.rollout), node.claimed)
        if key not in keys:
            keys[key] = len(graph.nodes)
            graph.nodes.append(node)
            graph.edges.append(set())
        return keys[key]

    number(Node(canonical(start, 0), Claimed()))
    for here in count():  # the list grows while it is gone through
        if here == len(graph.nodes):
            return graph
        for node in successors(graph.nodes[here]):
            graph.edges[here].add(number(node))
    raise AssertionError


STRATEGIES = [("canary", (100,)), ("canary", (5, 50, 100)), ("recreate", (5, 100))]


@pytest.fixture(scope="module", params=STRATEGIES, ids=["at once", "canary", "recreate"])
def graph(request: pytest.FixtureRequest) -> Graph:
    return explore(begin(*request.param))


def helped(rollout: Rollout) -> tuple[e.Fact, float]:
    """The fact that takes a phase on when all goes well."""
    r, change, side = rollout.id, rollout.change, rollout.leaving or "standby"
    expected: dict[str, e.Fact] = {
        "starting": e.StandbyReady(rollout_id=r),
        "checking": e.IdentityConfirmed(rollout_id=r),
        "warming": e.WarmedUp(rollout_id=r),
        "proving": e.GoldenPassed(rollout_id=r),
        "judging": e.Judged(rollout_id=r, change=change, verdict=PASS),
        "clearing": e.BarrierReached(rollout_id=r, change=change),
        "draining": e.Drained(rollout_id=r, side=side),
        "cutting": e.Drained(rollout_id=r, side=side),
        "stopping": e.Stopped(rollout_id=r, side=side),
        "restoring": e.PrimaryReady(rollout_id=r),
    }
    return expected.get(rollout.phase, e.Applied(rollout_id=r, change=change)), rollout.due or 0


def test_the_end_is_reached_from_every_state(graph: Graph):
    """Every order of events was tried without a broken rule (`check`); here: none leads into a dead end."""
    phases = {node.rollout.phase for node in graph.nodes}
    never = {"canary": {"holding", "restoring"}, "recreate": {"proven"}}  # users wait for it to go on
    assert set(get_args(Phase)) - phases == never[graph.nodes[0].rollout.options.strategy]

    into: list[set[int]] = [set() for _ in graph.nodes]
    for here, following in enumerate(graph.edges):
        for there in following:
            into[there].add(here)
    ends = {i for i, node in enumerate(graph.nodes) if node.rollout.terminal}
    reached, todo = set(ends), list(ends)
    while todo:
        todo += (new := into[todo.pop()] - reached)
        reached |= new
    assert len(reached) == len(graph.nodes)


def states(graph: Graph) -> list[Rollout]:
    return list({encode(node.rollout): node.rollout for node in graph.nodes}.values())


def test_when_all_goes_well_it_ends_by_itself(graph: Graph):
    """From every state, unless a person holds it back, or Redis, or an old version that is no measure: no
    cycle, no wait for nobody."""
    for rollout in states(graph):
        rollout, _ = fact(rollout, e.RedisBack(rollout_id=rollout.id), 0)
        if rollout.paused:
            rollout = accepted(command(rollout, e.Resume(), 0))
        going_back = rollout.going_back
        for _ in range(25):
            if rollout.terminal:
                break
            before = rollout
            if rollout.phase == "judging" and rollout.primary_crashes == UNSTEADY:
                rollout = accepted(command(rollout, e.Promote(), 0))
                continue
            happened, now = helped(rollout)
            rollout, _ = fact(rollout, happened, now)
            assert (rollout.phase, rollout.step) != (before.phase, before.step), before
        assert rollout.terminal
        assert going_back == (rollout.phase != "completed")


def accepted(answer: Any) -> Rollout:
    assert not isinstance(answer, Refusal), answer
    rollout: Rollout = answer[0]
    return rollout


def test_abort_ends_with_the_old_version_unless_it_is_too_late(graph: Graph):
    for rollout in states(graph):
        answer = command(rollout, e.Abort(), 0)
        fenced = rollout.leaving == "primary" and rollout.phase in ("draining", "cutting", "stopping")
        if rollout.terminal or (fenced and not rollout.recreate):
            assert isinstance(answer, Refusal)
            assert answer.exit_code == 6
            continue
        aborted = accepted(answer)
        assert aborted.going_back  # from which nothing turns back: `check`
        if not rollout.going_back:
            assert aborted.outcome == "aborted"
            assert actions_of(aborted)


def test_any_failure_before_the_return_ends_with_the_old_version(graph: Graph):
    for rollout in states(graph):
        r = rollout.id
        failures: list[e.Fact] = []
        if rollout.phase in ("starting", "checking", "warming", "proving", "proven", "shifting", "judging"):
            failures += [e.StandbyCrashed(rollout_id=r), e.StandbyFailed(rollout_id=r)]
        if rollout.phase == "proving":
            failures.append(e.GoldenFailed(rollout_id=r))
        if rollout.phase == "judging":
            failures.append(e.Judged(rollout_id=r, change=rollout.change, verdict=FAIL))
        for failure in failures:
            assert fact(rollout, failure, 0)[0].going_back


def test_stale_facts_change_nothing(graph: Graph):
    for rollout in states(graph):
        for happened, now in facts(rollout):
            foreign = msgspec.structs.replace(happened, rollout_id="of another one")
            assert fact(rollout, foreign, now) == (rollout, ())
            if isinstance(happened, (e.Applied, e.Judged, e.BarrierReached)) and (
                happened.change != rollout.change
            ):
                assert fact(rollout, happened, now) == (rollout, ())


def test_while_redis_is_down_nothing_advances(graph: Graph):
    """But for users who wait: they get the new version, or the old one back."""
    forward = ("shifting", "judging", "clearing", "draining", "cutting", "completed")
    for rollout in states(graph):
        if rollout.hold and not rollout.going_back and rollout.leaving == "primary":
            fenced = rollout.phase in ("draining", "cutting", "stopping")
            after, _ = fact(rollout, e.RedisLost(rollout_id=rollout.id), 0)
            assert rollout.suspended or after.going_back or fenced
        if not rollout.suspended or rollout.going_back:
            continue
        fenced = rollout.phase in ("draining", "cutting", "stopping")
        for happened, now in facts(rollout):
            after, _ = fact(rollout, happened, now)
            if after.suspended and not after.going_back and after.phase != rollout.phase:
                allowed = fenced or (rollout.hold and after.phase == "shifting")
                assert after.phase not in forward or allowed, (rollout.phase, happened, after.phase)
        for promotion in (e.Promote(), e.Promote(full=True)):
            answer = command(rollout, promotion, 0)
            assert isinstance(answer, Refusal)
            assert answer.exit_code == (7 if rollout.leaving != "primary" else 6)


def test_a_restarted_supervisor_is_told_everything_again(graph: Graph):
    for rollout in states(graph):
        after, actions = fact(decode(encode(rollout)), e.Restarted(rollout_id=rollout.id), 0)
        assert actions == actions_of(after)
        assert after.phase == rollout.phase or rollout.phase == "proven"
        assert actions or after.paused or after.suspended
