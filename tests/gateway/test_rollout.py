"""Rollouts as an operator sees them: how each ends, what is refused and why, what is kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.fleet.judge import Verdict, Window, judge
from gateway.fleet.rollout import (
    Options,
    Record,
    Refusal,
    Rollout,
    Version,
    command,
    decode,
    encode,
    fact,
    record_of,
)
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.facts import UNSTEADY
from gateway.settings import Judge

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


def test_canary_step_by_step():
    run = Run(steps=(5, 25, 100), hold=60)
    assert run.actions == (e.StartStandby(),)
    run.prove()
    for percent in (5, 25, 100):
        change = run.rollout.change
        weights = e.SetWeights(change=change, primary_bp=10_000 - percent * 100, standby_bp=percent * 100)
        assert run.actions == (weights,)
        run.applied()
        assert run.actions == (weights, e.Judge(change=change))
        run.judged(PASS, after=59)
        assert run.rollout.phase == "judging", "the step's time isn't over"
        run.judged(HOLD, after=2)
        assert run.rollout.phase == "judging", "it doesn't pass"
        run.judged(PASS)
    assert run.rollout.phase == "clearing"
    run.leave("primary")
    assert run.actions == (e.Finish(outcome="completed"),)
    assert run.rollout.exit_code == 0
    assert set(run.rollout.verdicts) == {"5%", "25%", "100%"}


def test_a_failing_verdict_rolls_back_at_once_also_while_paused():
    run = Run()
    run.prove()
    run.applied()
    run.ask(e.Pause())
    run.judged(FAIL)
    assert run.actions == (e.SetWeights(change=2, primary_bp=10_000, standby_bp=0),)
    run.judged(PASS, after=1e4)
    run.applied()
    run.leave("standby")
    assert (run.rollout.phase, run.rollout.exit_code, run.rollout.reason) == ("rolled_back", 4, "it is fail")
    assert run.rollout.verdicts["5%"] == FAIL


def test_a_standby_that_never_had_users_is_just_stopped():
    for kind, phase, code in [
        (e.StandbyFailed, "failed", 1),
        (e.StandbyCrashed, "rolled_back", 4),
    ]:
        run = Run()
        run.tell(kind, reason="no such file")
        assert run.actions == (e.Stop(side="standby"),)
        run.tell(e.Stopped, side="standby")
        assert (run.rollout.phase, run.rollout.exit_code) == (phase, code)
        assert "no such file" in run.rollout.reason


def test_wrong_golden_output_is_rolled_back():
    run = Run()
    for kind in (e.StandbyReady, e.IdentityConfirmed, e.WarmedUp):
        run.tell(kind)
    run.tell(e.GoldenFailed, reason="'2+2' gave '5'")
    run.tell(e.Stopped, side="standby")
    assert (run.rollout.phase, run.rollout.exit_code) == ("rolled_back", 4)
    assert run.rollout.change == 0, "the primary's weight was never touched"


def test_streams_that_outlive_the_drain_limit_are_cut_and_counted():
    run = Run(steps=(100,), drain_limit=900)
    run.prove()
    run.applied()
    run.ask(e.Promote())
    run.now += 899
    run.tell(e.Tick)
    assert run.rollout.phase == "clearing"
    run.now += 1
    run.tell(e.Tick)
    assert run.actions == (e.Drain(side="primary"), e.CutStreams(side="primary"))
    run.tell(e.Drained, side="primary", cut=2)
    run.tell(e.Stopped, side="primary")
    assert (run.rollout.phase, run.rollout.cut) == ("completed", 2)


def test_a_worker_that_ignores_the_cut_is_stopped_all_the_same():
    run = Run(steps=(100,), drain_limit=0)
    run.prove()
    run.applied()
    run.ask(e.Promote())
    run.tell(e.Tick)
    run.now += 31
    run.tell(e.Tick)
    assert run.actions == (e.Stop(side="primary"),)


def test_pause_waits_before_the_first_user_and_promote_takes_one_step():
    run = Run(steps=(5, 100))
    run.ask(e.Pause())
    run.prove()
    assert (run.rollout.phase, run.actions) == ("proven", ())
    run.ask(e.Promote())
    run.applied()
    run.judged(PASS, after=1e4)
    assert (run.rollout.phase, run.rollout.step_name) == ("judging", "5%")
    run.ask(e.Promote())
    assert (run.rollout.phase, run.rollout.step_name, run.rollout.paused) == ("shifting", "100%", True)
    run.ask(e.Resume())
    run.applied()
    run.judged(PASS, after=1e4)
    assert run.rollout.phase == "clearing"


def test_promote_full_goes_to_the_end_but_not_before_the_proof():
    run = Run()
    assert run.refused(e.Promote()).exit_code == 6
    run.ask(e.Promote(full=True))
    assert run.rollout.phase == "starting"
    run.prove()
    assert run.rollout.standby_bp == 10_000
    run.applied()
    assert run.rollout.phase == "clearing"


def test_abort_is_possible_until_the_old_version_is_fenced():
    run = Run(steps=(100,))
    run.prove()
    run.applied()
    run.ask(e.Promote())
    assert run.rollout.phase == "clearing"
    aborted = command(run.rollout, e.Abort(), run.now)
    assert not isinstance(aborted, Refusal)
    assert aborted[1] == (e.SetWeights(change=2, primary_bp=10_000, standby_bp=0),)
    run.tell(e.BarrierReached, change=1)
    refusal = run.refused(e.Abort())
    assert refusal.exit_code == 6
    assert "undo" in refusal.reason


def test_recreate_holds_requests_and_restores_the_old_version():
    run = Run(strategy="recreate", steps=(5, 100))
    assert run.actions == (e.SetWeights(change=1, primary_bp=0, standby_bp=0, hold=True),)
    run.applied()
    run.leave("primary")
    assert run.actions == (e.StartStandby(),)
    run.tell(e.StandbyFailed, reason="out of memory")
    run.tell(e.Stopped, side="standby")
    assert run.actions == (e.RestorePrimary(),)
    run.tell(e.PrimaryReady)
    assert run.actions == (e.SetWeights(change=2, primary_bp=10_000, standby_bp=0),)
    run.applied()
    assert (run.rollout.phase, run.rollout.exit_code) == ("rolled_back", 4)


def test_recreate_that_can_go_neither_way_fails_and_lets_the_waiting_go():
    run = Run(strategy="recreate")
    run.applied()
    run.leave("primary")
    run.ask(e.Abort())
    run.tell(e.Stopped, side="standby")
    run.tell(e.PrimaryFailed, reason="card lost")
    assert run.actions == (e.SetWeights(change=2, primary_bp=10_000, standby_bp=0, hold=False),)
    run.applied()
    assert (run.rollout.phase, run.rollout.exit_code) == ("failed", 1)
    assert "card lost" in run.rollout.reason


def test_recreate_is_judged_too():
    run = Run(strategy="recreate", hold=10)
    run.applied()
    run.leave("primary")
    run.prove()
    assert run.rollout.step_name == "100%"
    run.applied()
    good = command(run.rollout, e.Promote(), run.now)
    assert not isinstance(good, Refusal)
    assert good[0].phase == "completed"
    run.judged(FAIL)
    assert run.actions == (e.SetWeights(change=3, primary_bp=0, standby_bp=0, hold=True),)


def test_too_little_traffic_holds_for_ever():
    run = Run()
    run.prove()
    run.applied()
    for _ in range(100):
        run.judged(HOLD, after=3600)
    assert run.rollout.phase == "judging"
    assert len(run.rollout.log) < 20, "a verdict that doesn't change isn't news"


def test_a_crash_of_the_primary_starts_the_interval_anew():
    run = Run(hold=60)
    run.prove()
    run.applied()
    run.now += 59
    run.tell(e.PrimaryCrashed, reason="SIGKILL")
    assert e.Judge(change=1) in run.actions
    run.judged(PASS, after=30)
    assert run.rollout.step_name == "5%"
    assert run.rollout.phase == "judging"


def test_a_primary_that_keeps_crashing_does_not_keep_a_step_from_its_verdict():
    run = Run(steps=(5, 50, 100), hold=60)
    run.prove()
    run.applied()
    anew = 0
    for _ in range(10):  # each time before the step's time is over
        run.judged(HOLD, after=59)
        run.tell(e.PrimaryCrashed, reason="SIGKILL")
        anew += bool(run.actions)
    assert anew == UNSTEADY - 1
    run.judged(PASS, after=1)
    verdict = run.rollout.verdicts["5%"]
    assert (run.rollout.phase, verdict.outcome) == ("judging", "hold")
    assert "crashed 3 times or more" in verdict.reason
    assert sum("`promote` goes on" in entry.what for entry in run.rollout.log) == 1
    run.ask(e.Promote())
    run.applied()
    run.judged(PASS, after=61)
    assert run.rollout.step_name == "100%", "what was on one step is not held against the next"

    run = Run()
    run.prove()
    run.applied()
    for _ in range(UNSTEADY):
        run.tell(e.PrimaryCrashed)
    run.judged(FAIL)
    assert run.rollout.reason == "it is fail", "a new version that is bad is so by itself"


def test_a_crash_of_the_canary_is_its_verdict():
    run = Run()
    run.prove()
    run.applied()
    numbers = judge(Window(requests=9), Window(requests=9), Judge())
    run.judged(numbers)
    run.tell(e.StandbyCrashed, reason="m-alt-0 was killed (SIGKILL)")
    assert run.rollout.reason == "the standby crashed: m-alt-0 was killed (SIGKILL)"
    verdict = run.rollout.verdicts["5%"]
    assert (verdict.outcome, verdict.reason, verdict.measures[0].canary) == ("fail", "the canary crashed", 1)
    assert verdict.measures[1:] == numbers.measures[1:]


def test_redis_that_comes_and_goes_does_not_keep_a_step_from_its_end():
    run = Run(steps=(5, 100), hold=60)
    run.prove()
    run.applied()
    for _ in range(10):
        run.tell(e.RedisLost)
        run.judged(PASS, after=30)
        assert run.rollout.step_name == "5%"
        run.tell(e.RedisBack)
        assert run.actions == ()
    run.judged(PASS)
    assert run.rollout.step_name == "100%"


def test_redis_down_refuses_promotion_and_allows_abort():
    run = Run()
    run.prove()
    run.tell(e.RedisLost)
    run.applied()
    assert run.rollout.phase == "shifting"
    run.tell(e.RedisBack)
    assert run.actions
    run.applied()
    run.tell(e.RedisLost)
    run.judged(PASS, after=1e4)
    assert run.rollout.phase == "judging"
    assert run.refused(e.Promote()).exit_code == 7
    run.ask(e.Abort())
    assert run.rollout.phase == "reverting"


def test_users_who_wait_do_not_wait_for_redis():
    """Recreate: they get the old version back while it runs, and the new one when that is all there is."""
    run = Run(strategy="recreate")
    run.tell(e.RedisLost)
    assert run.actions == (e.SetWeights(change=2, primary_bp=10_000, standby_bp=0),)
    run.applied()
    assert (run.rollout.phase, "Redis is down" in run.rollout.reason) == ("rolled_back", True)

    run = Run(strategy="recreate")
    run.applied()
    run.leave("primary")
    run.tell(e.RedisLost)
    run.prove()
    assert (run.rollout.phase, run.rollout.standby_bp, run.rollout.hold) == ("shifting", 10_000, False)
    run.applied()
    assert run.rollout.phase == "shifting", "that is all"
    run.tell(e.RedisBack)
    run.applied()
    assert run.rollout.phase == "judging"


def test_a_clock_that_was_set_back_between_two_supervisors_gives_streams_no_hour_more():
    run = Run(steps=(100,), hold=0, drain_limit=100)
    run.prove()
    run.applied()
    run.judged(PASS)
    assert (run.rollout.phase, run.rollout.due) == ("clearing", run.now + 100)
    run.now -= 3600
    run.tell(e.Restarted)
    assert run.rollout.due == run.now + 100
    run.now += 50
    run.tell(e.Restarted)
    assert run.rollout.due == run.now + 50, "nor more time by each restart"


def test_start_is_refused_with_a_reason_and_a_code():
    asked = e.Start(id="r", model="m", old=OLD, new=NEW)
    bad = msgspec.structs.replace(asked, options=Options(steps=(50, 25), hold=-1))
    answer = command(None, bad, 0)
    assert isinstance(answer, Refusal)
    assert answer.exit_code == 2
    assert "steps" in answer.reason
    assert "hold" in answer.reason

    big = msgspec.structs.replace(asked, misfit="20 GiB + 20 GiB > 32 GiB")
    answer = command(None, big, 0)
    assert isinstance(answer, Refusal)
    assert answer.exit_code == 5
    assert "recreate" in answer.reason
    fits_alone = msgspec.structs.replace(big, options=Options(strategy="recreate"))
    assert not isinstance(command(None, fits_alone, 0), Refusal)

    assert Run().refused(asked).exit_code == 6


@pytest.mark.parametrize("asked", [e.Pause(), e.Resume(), e.Promote(), e.Abort(), e.Undo(id="u")])
def test_without_a_rollout_there_is_nothing_to_command(asked: e.Command):
    answer = command(None, asked, 0)
    assert isinstance(answer, Refusal)
    assert answer.exit_code == 6


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (0, 100),
        (50,),
        (100, 100),
        (5, 101),
        (float("nan"), 100),
        (-5, 100),
        (0.001, 100),
        tuple(n / 2 for n in range(1, 201)),
    ],
)
def test_bad_steps(steps: tuple[float, ...]):
    assert Options(steps=steps).problems()
    assert not Options(steps=(0.01, 100)).problems()


def completed() -> Run:
    run = Run(steps=(100,))
    run.prove()
    run.applied()
    run.ask(e.Promote())
    run.leave("primary")
    return run


def test_undo_is_a_rollout_back_without_judging():
    run = completed()
    run.ask(e.Undo(id="r2", completed=record_of(run.rollout)))
    undo = run.rollout
    assert (undo.id, undo.old, undo.new, undo.full) == ("r2", NEW, OLD, True)
    assert (undo.phase, undo.terminal) == ("starting", False)
    assert completed().refused(e.Abort()).reason.endswith("`undo` goes back")


def test_what_changed_nothing_is_not_what_is_undone():
    run = Run()
    assert run.refused(e.Undo(id="u")).exit_code == 6
    run.ask(e.Abort())
    run.tell(e.Stopped, side="standby")
    assert run.rollout.phase == "aborted"
    reason = run.refused(e.Undo(id="u")).reason
    assert reason == "nothing to undo: no rollout of m has changed anything; the last one, r1, was aborted"
    run.ask(e.Undo(id="r2", completed=record_of(completed().rollout)))
    assert (run.rollout.old, run.rollout.new) == (NEW, OLD)


def test_the_record_for_the_history():
    record = record_of(completed().rollout)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    assert (record.outcome, record.exit_code, record.new) == ("completed", 0, NEW)
    assert [entry.phase for entry in record.log][:3] == ["starting", "checking", "warming"]
    with pytest.raises(ValueError, match="isn't over"):
        record_of(Run().rollout)


def test_only_its_own_version_of_the_file_is_read():
    saved = encode(Run().rollout)
    with pytest.raises(ValueError, match="version 2"):
        decode(saved.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ValueError, match="truncated"):
        decode(saved[:-5])
    with pytest.raises(ValueError, match="phase"):
        decode(saved.replace(b'"phase":"starting"', b'"phase":"dancing"'))


def test_the_log_is_bounded():
    run = Run()
    run.prove()
    for _ in range(500):
        run.ask(e.Pause())
        run.ask(e.Resume())
    assert len(run.rollout.log) == 200
