"""Rollouts as an operator sees them: how each ends, and what can be asked of it on the way."""

from __future__ import annotations

from gateway.fleet.rollout import (
    Refusal,
    command,
)
from gateway.fleet.rollout import events as e
from tests.gateway.rollout_run import FAIL, HOLD, PASS, Run


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
