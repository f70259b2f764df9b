"""What of a swap is compared with what: users, probes, steps, the time before."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from contracts.times import seconds_of
from gateway.fleet.driver import comparing, judging, measure, probing
from gateway.fleet.driver.measure import Probes, Sample, since
from gateway.fleet.driver.peer import Lost, Times
from gateway.fleet.driver.records import Records
from gateway.fleet.judge import Verdict, Window, step_least
from gateway.fleet.rollout import events as e
from gateway.settings import Judge
from tests.gateway.swap_parts import some_rollout, users, window

LIMITS = Judge(min_requests=10)


FAST, SLOW = 100, 200  # buckets; the second is 76 times the first


LATER = FAST + 40  # more than any limit


NOTHING = Sample()


def probes(count: int, bucket: int = FAST) -> Sample:
    """As they are counted: the workers have their times among the users'."""
    times = Window(ttft={bucket: count}, tpot={bucket: count})
    return Sample(users=times, probes=asked(count, bucket))


def asked(count: int, bucket: int = FAST, *, even: bool = True) -> Probes:
    every = window(count, bucket) if count else Window()
    return Probes(every=every, even=Window(ttft=every.ttft, tpot=every.tpot) if even else Window())


def verdict_on(
    canary: Sample, primary: Sample, before: Sample = NOTHING, so_far: Sample = NOTHING
) -> Verdict:
    return comparing.verdict_on(canary, primary, before, LIMITS, None, so_far=so_far)


def users_tell(canary: Sample, primary: Sample, before: Sample = NOTHING, so_far: Sample = NOTHING) -> bool:
    return comparing.users_tell(canary, primary, before, LIMITS, so_far=so_far)


def test_users_are_compared_with_users_and_probes_with_probes() -> None:
    verdict = verdict_on(users(50), users(50))
    assert (verdict.outcome, verdict.reference) == ("pass", "same interval")
    # Few users with slow requests on the old version, and probes on both that are equally fast.
    verdict = verdict_on(probes(20), users(50, SLOW) + probes(20))
    assert (verdict.outcome, verdict.measures[2].primary_samples) == ("pass", 20)
    verdict = verdict_on(users(50, SLOW) + probes(20), users(50) + probes(20))
    assert verdict.outcome == "fail"


def test_errors_count_wherever_they_happen() -> None:
    verdict = verdict_on(users(5, errors=5) + probes(20), users(50))
    assert (verdict.outcome, verdict.measures[1].canary_samples) == ("fail", 25)


def test_a_version_with_all_users_is_compared_with_the_time_before() -> None:
    before = users(500)
    verdict = verdict_on(users(50), Sample(), before)
    assert (verdict.outcome, verdict.reference) == ("pass", "before the rollout")
    assert verdict_on(users(50, SLOW), Sample(), before).outcome == "fail"
    assert verdict_on(users(50), Sample()).outcome == "hold"


def test_an_old_version_that_was_fast_at_a_quiet_hour_is_no_measure_at_a_busy_one() -> None:
    quiet, busy = users(5000), users(60, LATER)
    verdict = verdict_on(users(60, LATER), Sample(), quiet, so_far=busy)
    assert (verdict.outcome, verdict.reference) == ("pass", "earlier steps")
    # With a part of the users it was faster than it had been with all of them.
    verdict = verdict_on(users(60, LATER), Sample(), busy, so_far=quiet)
    assert (verdict.outcome, verdict.reference) == ("pass", "before the rollout")
    assert verdict_on(users(60, SLOW), Sample(), quiet, so_far=busy).outcome == "fail"
    assert users_tell(users(60), Sample(), so_far=busy)


def probed(count: int, bucket: int = FAST, *, earlier: int = 0, users: int = 0, even: bool = True) -> Sample:
    """Probes of a step, after those of earlier steps that were fast; and how many users came beside them."""
    return Sample(
        users=Window(requests=users),
        probes=asked(count, bucket, even=even),
        earlier=asked(earlier),
    )


def test_probes_of_earlier_steps_count_on_but_each_step_is_seen_by_itself() -> None:
    assert verdict_on(probed(5), probed(5)).outcome == "hold"
    begun = verdict_on(probed(0, earlier=10), probed(0, earlier=10))
    assert (begun.outcome, "0 of 5 requests seen by the canary, on this step" in begun.reason) == (
        "hold",
        True,
    )
    whole = probed(5, earlier=10)
    assert verdict_on(whole, whole).outcome == "pass"
    assert verdict_on(probed(4, earlier=50), whole).outcome == "hold"
    late = verdict_on(probed(24, SLOW, earlier=999), probed(24, earlier=999))
    assert (late.outcome, "on this step" in late.reason) == ("fail", True)


def test_a_canary_that_alone_has_users_is_not_blamed_for_their_load() -> None:
    """One user who asks without end is on one side. Probes beside him say nothing against the canary."""
    loaded, idle = probed(80, LATER, users=6, even=False), probed(80, even=False)
    assert verdict_on(loaded, idle).outcome == "hold"
    as_fast = probed(80, users=6, even=False)
    assert verdict_on(as_fast, idle).outcome == "pass"
    now_and_then = loaded + probed(20)
    verdict = verdict_on(now_and_then, idle + probed(20))
    assert (verdict.outcome, verdict.reference) == ("pass", "even load")
    bad = loaded + probed(20, LATER)
    assert verdict_on(bad, idle + probed(20)).outcome == "fail"
    erring = loaded + Sample(users=Window(requests=9, errors=9))
    assert verdict_on(erring, idle).outcome == "fail"


def test_users_without_any_to_compare_them_with_tell_nothing() -> None:
    fresh = verdict_on(users(60), probed(12))
    assert (fresh.outcome, fresh.reference) == ("hold", "same interval")
    assert not users_tell(users(60), probed(12))
    assert users_tell(users(60), probed(12), users(60))


def test_a_canary_with_all_users_may_be_as_slow_as_the_old_version_was_with_them() -> None:
    loaded = probed(8, LATER, earlier=20, users=6, even=False)
    idle = probed(8, earlier=20, even=False)
    assert verdict_on(loaded, idle).outcome == "hold"
    was_loaded = msgspec.structs.replace(idle, earlier=asked(20, LATER))
    verdict = verdict_on(loaded, was_loaded)
    assert (verdict.outcome, verdict.reference) == ("pass", "earlier steps")
    bad = probed(8, SLOW, earlier=20, users=6, even=False)
    assert verdict_on(bad, was_loaded).outcome == "hold"
    without_an_excuse = probed(24, LATER, earlier=20)
    assert verdict_on(without_an_excuse, probed(24, earlier=20)).outcome == "fail"


def test_an_old_version_that_no_longer_answers_is_compared_as_it_was() -> None:
    silent = Probes(every=Window(requests=8, errors=8))
    gone = Sample(probes=silent, earlier=asked(20))
    verdict = verdict_on(probed(8, earlier=20), gone)
    assert (verdict.outcome, verdict.reference) == ("pass", "earlier steps")
    assert verdict_on(probed(24, SLOW, earlier=20), gone).outcome == "hold"


class _Worker:
    """A peer that answers probes at once: `bucket` is their time, None an error."""

    def __init__(self, target: str, bucket: int | None = FAST) -> None:
        self.target = target
        self.bucket = bucket
        self.probes = 0
        self.health: dict[str, object] = {}

    async def get(self, path: str) -> dict[str, object]:
        return self.health if path == "/health" else {"ttft": {}, "tpot": {}}

    async def timed(self, *_: object) -> Times:
        self.probes += 1
        if self.bucket is None:
            raise Lost("it errs")
        return Times(seconds_of(self.bucket), seconds_of(self.bucket))


class _Users:
    """As gateways show them: how many are in flight on each target."""

    def __init__(self, **on: int) -> None:
        self.on = on

    def window(self, model: str, targets: Collection[str]) -> Window:
        return Window()

    def inflight(self, model: str, targets: Collection[str]) -> int:
        return sum(self.on.get(target, 0) for target in targets)

    def traffic(self) -> tuple[int, int]:
        return 0, sum(self.on.values())


async def test_a_round_has_no_more_probes_than_a_worker_computes_at_a_time() -> None:
    new, old = _Worker("new"), _Worker("old")
    new.health = {"max_num_seqs": 2}
    prober = probing.Prober(measure.Meter(_Users(), "m"))
    for _ in range(2):
        await prober.once([new], [old])  # type: ignore[list-item]
    assert (new.probes, old.probes) == (4, 4)


@pytest.mark.parametrize(
    ("turn", "took", "has_users", "seconds"),
    [
        (0, 0.05, False, probing.PAUSE),  # nobody is there who could feel them
        (0, 0.05, True, 0.45),  # a tenth of the time
        (0, 0.001, True, probing.PAUSE),
        (0, 5.0, True, probing.LONG_PAUSE),  # the judge waits for them
        (probing.MANY, 0.05, False, probing.LONG_PAUSE),
        (probing.MANY, 0.05, True, probing.LONG_PAUSE),
    ],
)
def test_probes_come_further_apart_while_users_are_served(
    turn: int, took: float, has_users: bool, seconds: float
) -> None:
    assert probing.pause(turn, took, has_users=has_users) == pytest.approx(seconds)


@pytest.mark.parametrize(("new", "old", "even"), [(0, 0, 1), (1, 0, 0), (1, 1, 1), (0, 5, 1), (2, 1, 0)])
async def test_probes_are_even_unless_the_new_version_has_more_to_do(new: int, old: int, even: int) -> None:
    meter = measure.Meter(_Users(new=new, old=old), "m")
    sides = [_Worker("new")], [_Worker("old")]
    await probing.Prober(meter).once(*sides)  # type: ignore[arg-type]
    for target, sample in (await meter.read([*sides[0], *sides[1]])).items():  # type: ignore[list-item]
        seen = sample.probes.every.requests, sum(sample.probes.even.ttft.values())
        assert seen == (probing.AT_ONCE, even * probing.AT_ONCE), target


class _Step:
    """Verdicts of one step after another, at the pace of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(judging, "EVERY", 0.01)
        monkeypatch.setattr(probing, "PAUSE", 0.001)
        self._verdicts: asyncio.Queue[Verdict] = asyncio.Queue()
        self._folder = folder
        self.new, self.old = _Worker("m-alt-0.1"), _Worker("m-0.1")
        self.restart()

    def restart(self) -> None:
        """A supervisor that knows nothing of what was measured before."""
        self._judging = judging.Judging(
            _Users(), Records(self._folder), "m", LIMITS, self._take, lambda: None
        )

    def _take(self, happened: e.Fact) -> None:
        assert isinstance(happened, e.Judged)
        self._verdicts.put_nowait(happened.verdict)

    async def _next(self, running: asyncio.Task[None]) -> Verdict:
        verdict = asyncio.create_task(self._verdicts.get())
        await asyncio.wait((verdict, running), return_when=asyncio.FIRST_COMPLETED)
        if not verdict.done():
            verdict.cancel()
            running.result()
        return await verdict

    async def judged(self) -> tuple[Verdict, int]:
        """The step's first verdict that isn't *hold*, and how many requests of the canary it saw."""
        one = some_rollout(phase="judging", standby_bp=500)
        running = asyncio.create_task(self._judging.run(one, 1, [self.new], lambda: [self.old]))  # type: ignore[list-item]
        try:
            async with asyncio.timeout(30):
                while (verdict := await self._next(running)).outcome == "hold":
                    continue
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        while not self._verdicts.empty():
            self._verdicts.get_nowait()
        return verdict, verdict.measures[1].canary_samples


async def test_what_begins_on_the_third_step_is_seen_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bucket, reason in ((SLOW, "late"), (None, "errs")):
        step = _Step(tmp_path, monkeypatch)
        assert (await step.judged())[0].outcome == "pass"
        assert (await step.judged())[0].outcome == "pass"
        step.new.bucket = bucket
        verdict, _ = await step.judged()
        assert (verdict.outcome, reason in verdict.reason) == ("fail", True)


async def test_a_mistake_in_probes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _Step(tmp_path, monkeypatch)
    monkeypatch.setattr(probing, "bucket_of", None)
    with pytest.raises(TypeError):
        await step.judged()


async def test_a_supervisors_successor_counts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _Step(tmp_path, monkeypatch)
    _, first = await step.judged()
    assert first >= LIMITS.min_requests
    _, second = await step.judged()
    assert second >= first + step_least(LIMITS)
    step.restart()
    asked = step.new.probes
    _, third = await step.judged()
    assert LIMITS.min_requests <= third <= step.new.probes - asked


def test_times_of_an_earlier_rollouts_probes_are_no_users() -> None:
    life = Sample(users=Window(ttft={FAST: 300}, tpot={FAST: 300}))
    assert not life.has_users(LIMITS)


def test_an_interval_is_the_difference_of_two_readings() -> None:
    then, now = {"m-0.1": users(10)}, {"m-0.1": users(25), "m-1.1": users(5)}
    assert since(now, then).users == window(20, FAST)
