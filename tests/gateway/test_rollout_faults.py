"""Rollouts while something fails: versions that crash, a Redis that comes and goes, a clock set back."""

from __future__ import annotations

from gateway.fleet.judge import Window, judge
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.facts import UNSTEADY
from gateway.settings import Judge
from tests.gateway.rollout_run import FAIL, HOLD, PASS, Run


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
