"""The judge: what is too little to say, what is bad beyond chance, and how often it is wrong."""

from __future__ import annotations

import math
import random
from itertools import combinations

import msgspec
import pytest

from contracts.times import bucket_of, seconds_of
from gateway.fleet.judge import Verdict, Window, judge, step_least
from gateway.fleet.statistics import (
    binomial_tail,
    fisher_tail,
    median_ratio,
    quantile,
    rank_sum,
)
from gateway.settings import Judge as Limits

LIMITS = Limits()  # 50 requests, 1 % errors, ×1.5 to the first token, ×1.3 per token


def times(seconds: list[float]) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in seconds:
        found[bucket_of(one)] = found.get(bucket_of(one), 0) + 1
    return found


def window(
    n: int, *, errors: int = 0, ttft: float = 0.2, tpot: float = 0.02, crashes: int = 0, seed: int = 1
) -> Window:
    """`n` requests with log-normal times around the given medians, as users' prompts make them."""
    dice = random.Random(seed)
    good = n - errors
    return Window(
        requests=n,
        errors=errors,
        ttft=times([ttft * dice.lognormvariate(0, 0.5) for _ in range(good)]),
        tpot=times([tpot * dice.lognormvariate(0, 0.2) for _ in range(good)]),
        crashes=crashes,
    )


def outcome(canary: Window, primary: Window | None = None) -> str:
    return judge(canary, primary if primary is not None else window(1000, seed=2), LIMITS).outcome


# --- the rules


def test_as_good_as_the_primary_passes():
    verdict = judge(window(200), window(1000, seed=2), LIMITS)
    assert verdict.outcome == "pass"
    assert [measure.name for measure in verdict.measures] == ["crashes", "error_rate", "ttft", "tpot"]
    ttft = verdict.measures[2]
    assert ttft.ratio == pytest.approx(1, abs=0.2)
    assert (ttft.canary_samples, ttft.primary_samples) == (200, 1000)


@pytest.mark.parametrize("errors", [0, 1, 3])
def test_three_requests_say_nothing(errors: int):
    verdict = judge(window(3, errors=errors), window(1000, seed=2), LIMITS)
    assert verdict.outcome == "hold"
    assert "3 of 50 requests" in verdict.reason


def test_one_error_over_the_limit_may_be_chance_and_many_are_not():
    assert outcome(window(60, errors=1)) == "hold"
    assert outcome(window(200, errors=1)) == "pass"
    assert outcome(window(60, errors=8)) == "fail"
    assert outcome(window(60, errors=60)) == "fail"


def test_errors_of_both_alike_are_not_the_canarys_fault():
    verdict = judge(window(300, errors=30), window(3000, errors=300, seed=2), LIMITS)
    assert verdict.outcome == "hold"
    assert "so does the primary" in verdict.reason
    assert outcome(window(300, errors=90), window(3000, errors=300, seed=2)) == "fail"


def test_a_canary_may_be_better_than_a_broken_primary():
    assert outcome(window(300), window(1000, errors=400, seed=2)) == "pass"


@pytest.mark.parametrize(("worse", "name"), [({"ttft": 0.6}, "ttft"), ({"tpot": 0.04}, "tpot")])
def test_slow_fails(worse: dict[str, float], name: str):
    verdict = judge(window(100, **worse), window(1000, seed=2), LIMITS)
    assert verdict.outcome == "fail"
    [failed] = [measure for measure in verdict.measures if measure.outcome == "fail"]
    assert failed.name == name
    assert failed.ratio == pytest.approx(3 if name == "ttft" else 2, rel=0.2)


def test_slower_within_the_limit_passes():
    assert outcome(window(400, ttft=0.2 * 1.3, tpot=0.02 * 1.1)) == "pass"


def test_a_few_very_slow_requests_fail_though_the_rest_is_fast():
    good = window(200)
    slow = Window(requests=40, ttft={bucket_of(20): 40}, tpot={bucket_of(0.02): 40})
    verdict = judge(good + slow, window(1000, seed=2), LIMITS)
    assert verdict.outcome == "fail"
    assert "95th percentile" in verdict.reason
    assert verdict.measures[2].ratio is not None
    assert verdict.measures[2].ratio < 1.5


def test_one_outlier_doesnt_fail():
    outlier = Window(requests=1, ttft={bucket_of(100): 1}, tpot={bucket_of(5): 1})
    assert outcome(window(50) + outlier) == "pass"


def test_times_that_nobody_can_tell_apart_pass_whatever_their_ratio():
    assert outcome(window(500, ttft=0.004), window(500, ttft=0.001, seed=2)) == "pass"


def test_a_crash_fails_at_once():
    verdict = judge(Window(crashes=1), Window(), LIMITS)
    assert (verdict.outcome, verdict.reason) == ("fail", "the canary crashed")


def test_a_crash_of_the_primary_isnt_held_against_the_canary():
    assert outcome(window(200), window(1000, crashes=3, seed=2)) == "pass"


def test_without_a_primary_times_cant_be_judged_but_errors_can():
    assert outcome(window(500), Window()) == "hold"
    assert outcome(window(500, errors=100), Window()) == "fail"
    assert outcome(Window(), Window()) == "hold"


def test_a_failure_is_final():
    failed = judge(window(60, errors=30), window(1000, seed=2), LIMITS)
    assert judge(window(5000), window(5000, seed=2), LIMITS, before=failed) == failed
    held = judge(window(3), window(1000, seed=2), LIMITS)
    assert judge(window(500), window(1000, seed=2), LIMITS, before=held).outcome == "pass"


GOOD = window(1000), window(1000, seed=2)  # of the steps before


def on_step(canary: Window, primary: Window, earlier: tuple[Window, Window] = GOOD) -> Verdict:
    return judge(earlier[0] + canary, earlier[1] + primary, LIMITS, step=(canary, primary))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"errors": 3}, "the canary errs: 3 of 10 requests"),
        ({"ttft": 0.2 * 6}, "first tokens are late"),
        ({"tpot": 0.02 * 3}, "tokens are slow"),
    ],
)
def test_what_begins_on_a_later_step_isnt_hidden_by_what_was_before(bad: dict[str, float], reason: str):
    canary = window(10, **bad)  # type: ignore[arg-type]
    assert judge(GOOD[0] + canary, GOOD[1] + window(10, seed=5), LIMITS).outcome == "pass"
    verdict = on_step(canary, window(10, seed=5))
    assert (verdict.outcome, reason in verdict.reason) == ("fail", True)
    assert verdict.reason.endswith("on this step")


def test_each_step_must_show_some_requests_of_its_own():
    assert step_least(LIMITS) == 10
    verdict = on_step(window(9), window(9, seed=5))
    assert verdict.outcome == "hold"
    assert "9 of 10 requests seen by the canary, on this step" in verdict.reason
    assert on_step(window(10), window(10, seed=5)).outcome == "pass"
    assert on_step(window(10, errors=1), window(10, seed=5)).outcome == "hold"
    assert on_step(window(100, errors=1), window(100, seed=5)).outcome == "pass"
    assert [step_least(Limits(min_requests=n)) for n in (1, 5, 20, 1000)] == [1, 5, 5, 200]


def test_too_few_in_all_say_nothing_however_bad():
    few = window(30, errors=10, ttft=3), window(30, seed=2)
    assert judge(*few, LIMITS, step=few).outcome == "hold"


def test_one_of_ten_is_no_tail():
    slow = Window(requests=1, ttft={bucket_of(30): 1}, tpot={bucket_of(3): 1})
    assert on_step(window(9) + slow, window(10, seed=5)).outcome == "pass"
    very_slow = Window(requests=6, ttft={bucket_of(30): 6}, tpot={bucket_of(0.02): 6})
    assert on_step(window(7) + very_slow, window(13, seed=5)).outcome == "fail"


@pytest.mark.parametrize(("becomes", "failed"), [(1.0, 0), (3.0, 50)])
def test_a_canary_that_turns_bad_on_its_third_step_is_seen_and_a_good_one_passes(becomes: float, failed: int):
    """50 rollouts of three steps of probes, looked at after every fifth pair until they pass. One may come to
    another end."""
    dice = random.Random(11)
    outcomes = [_rollout(dice, (1.0, 1.0, becomes)) for _ in range(50)]
    assert abs(outcomes.count("fail") - failed) <= 1
    assert abs(outcomes.count("pass") - (50 - failed)) <= 1


@pytest.mark.parametrize(("slower", "failed"), [(1.0, 0), (2.5, 100)])
def test_requests_that_come_together_are_worth_no_more_than_one(slower: float, failed: int):
    """100 rollouts' first steps, in rounds of four, of which most of the spread is the round's, and one round
    in ten on either side is held up by something else on the machine."""
    dice = random.Random(3)
    assert abs([_in_rounds(dice, slower) for _ in range(100)].count("fail") - failed) <= 1


def _in_rounds(dice: random.Random, slower: float) -> str:
    canary, primary = Window(), Window()
    for _ in range(60):
        canary += _lot(dice, 4, 0.15, slower * _of_a_round(dice), 0.0)
        primary += _lot(dice, 4, 0.15, _of_a_round(dice), 0.0)
        outcome = judge(canary, primary, LIMITS, step=(canary, primary), together=4).outcome
        if outcome != "hold":
            break
    return outcome


def _of_a_round(dice: random.Random) -> float:
    return dice.lognormvariate(0, 0.2) * (2 if dice.random() < 0.1 else 1)


def _rollout(dice: random.Random, slowness: tuple[float, ...]) -> str:
    earlier = Window(), Window()
    for slower in slowness:
        step = Window(), Window()
        for _ in range(40):
            step = step[0] + _lot(dice, 5, 0.3, slower, 0.0), step[1] + _lot(dice, 5, 0.3)
            whole = earlier[0] + step[0], earlier[1] + step[1]
            outcome = judge(*whole, LIMITS, step=step).outcome
            if outcome != "hold":
                break
        if outcome != "pass":
            return outcome
        earlier = whole
    return "pass"


def test_a_verdict_is_kept_as_json():
    verdict = judge(window(60, errors=8), window(1000, seed=2), LIMITS, reference="before the rollout")
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
    assert msgspec.json.decode(msgspec.json.encode(window(9)), type=Window) == window(9)


def test_a_window_is_the_difference_of_two_readings():
    before, during = window(70, errors=2), window(30, errors=1, seed=5)
    assert (before + during) - before == during


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_false_alarms_are_rare_though_it_looks_again_and_again(spread: float):
    """100 canaries as good as their primaries, looked at after every tenth request until 200."""
    dice = random.Random(7)
    alarms = 0
    for _ in range(100):
        canary, primary = Window(), Window()
        for look in range(20):
            canary += _lot(dice, 10, spread)
            primary += _lot(dice, 20, spread)
            if look >= 4 and judge(canary, primary, LIMITS).outcome == "fail":
                alarms += 1
                break
    assert alarms <= 1


def _lot(dice: random.Random, n: int, spread: float, slower: float = 1.0, rate: float = 0.003) -> Window:
    errors = sum(dice.random() < rate for _ in range(n))
    return Window(
        requests=n,
        errors=errors,
        ttft=times([slower * 0.2 * dice.lognormvariate(0, spread) for _ in range(n - errors)]),
        tpot=times([slower * 0.02 * dice.lognormvariate(0, spread / 3) for _ in range(n - errors)]),
    )


# --- the statistics, against sums and counts done the long way


@pytest.mark.parametrize(("k", "n", "p"), [(1, 3, 0.01), (5, 50, 0.01), (30, 60, 0.5), (1, 1000, 0.01)])
def test_binomial_tail(k: int, n: int, p: float):
    expected = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    assert binomial_tail(k, n, p) == pytest.approx(expected, rel=1e-9)


def test_binomial_tail_at_its_edges():
    assert binomial_tail(0, 10, 0.1) == 1
    assert binomial_tail(1, 10, 0.0) == 0
    assert binomial_tail(10, 10, 1.0) == 1
    assert 0 <= binomial_tail(500_000, 1_000_000, 0.01) < 1e-300


@pytest.mark.parametrize(
    ("a", "n", "b", "m"), [(5, 50, 0, 50), (3, 10, 7, 90), (0, 5, 9, 9), (10, 10, 1, 30)]
)
def test_fisher_tail(a: int, n: int, b: int, m: int):
    hits = a + b
    ways = sum(math.comb(n, i) * math.comb(m, hits - i) for i in range(a, min(n, hits) + 1) if hits - i <= m)
    assert fisher_tail(a, n, b, m) == pytest.approx(ways / math.comb(n + m, hits), rel=1e-9)


def test_rank_sum_is_near_the_exact_distribution():
    """Against all ways to deal 14 ranks to 7 canaries and 7 primaries, for a share that matters."""
    canary, primary = [4, 8, 9, 10, 12, 13, 14], [1, 2, 3, 5, 6, 7, 11]
    share, p = rank_sum(dict.fromkeys(canary, 1), dict.fromkeys(primary, 1), lambda bucket: bucket)
    rank_sums = [sum(ranks) for ranks in combinations(range(1, 15), 7)]
    exact = sum(total >= sum(canary) for total in rank_sums) / len(rank_sums)
    assert share == pytest.approx((sum(canary) - 28) / 49)
    assert p == pytest.approx(exact, rel=0.15)


def test_rank_sum_with_ties():
    assert rank_sum({3: 50}, {3: 50}, lambda bucket: bucket) == (0.5, 1.0)
    share, p = rank_sum({3: 50, 4: 50}, {3: 100}, lambda bucket: bucket)
    assert share == pytest.approx(0.75)
    assert p < 1e-10


def test_buckets_are_true_to_four_percent():
    for seconds in (1e-4, 0.0371, 0.2, 3.0, 777.0):
        assert seconds_of(bucket_of(seconds)) == pytest.approx(seconds, rel=0.0225)
    assert bucket_of(0) == 0
    assert quantile({}, 0.5) is None
    assert quantile(times([0.1, 0.2, 0.3]), 0.5) == pytest.approx(0.2, rel=0.0225)
    dice = random.Random(3)
    one, other = ([dice.lognormvariate(0, 1) for _ in range(n)] for n in (31, 24))
    ratios = sorted(a / b for a in one for b in other)
    middle = ratios[len(ratios) // 2]
    assert median_ratio(times(one), times(other)) == pytest.approx(middle, rel=0.05)
    assert median_ratio(times([0.2, 0.4]), times([0.1, 0.2])) == pytest.approx(2, rel=0.05)
