"""Is the new version as good as the old one? Counts of one interval in, a verdict with its numbers out.

Three questions, each about the same interval of canary and primary: does it err more, is its first token
later, are its tokens slower. A crash of the canary answers them all. The rules:

- Fewer than `min_requests` of the canary's requests say nothing: *hold*. Three requests, one of them failed,
  are not an error rate of a third. Times need as many of the primary's, too.
- *Fail* needs evidence, not a measured value over a limit: a one-sided test at `ALPHA`. *Pass* needs the
  measured values within the limits. In between (over a limit, perhaps by chance): hold, until more requests
  have told.
- A failure is final: `judge` returns it again whatever the numbers say later.
- What a rollout has gathered since its beginning counts towards `min_requests`, but it can't hide what begins
  later: where counts are of more than the present `step`, that is tested by itself as well, and the worse
  finding counts. `step_least` of its own requests are needed, 10 of 50: two errors in ten, against a limit of
  1 %, are no chance (p = 0.004), one holds until there were 99 without; of ten times against ten, p falls
  below `ALPHA` when the canary's, with the limit taken off, is the longer in 82 of the 100 pairs, and the
  step holds when it is in more than 50. Errors that begin on a step, in a share q of the requests, stay
  unseen there with the chance (1 - q)**n: of ten, 3 % for q = 0.3; of a longer hold's 50, 0.5 % for q = 0.1.

**Errors**: the exact binomial test against `max_error_rate` (Clopper and Pearson, Biometrika 26, 1934: the
normal approximation is useless at one error in a hundred), and Fisher's exact test against the primary: when
both err alike, the cause is elsewhere, nobody is to blame and a person has to look (hold).

**Times** are counted in buckets of a factor 2**(1/16), so that "`limit` times slower" is a shift of the
histogram. The bulk is compared with the rank-sum test of Mann and Whitney (Annals of Mathematical Statistics
18, 1947; with the correction for ties), the canary against the primary's times multiplied by the limit. It is
the test of Netflix's judge in Kayenta, chosen for the same reason: latencies have long tails, in which a mean
of fifty samples drowns. What ranks don't see, a few very slow requests, the second test sees: how many lie
above `limit` times the primary's 95th percentile, by Fisher's test; a single one is no tail. The ratio that
is shown is the estimator that belongs to the ranks, the median of all ratios of pairs (Hodges and Lehmann,
ibid. 34, 1963). Differences smaller than `INDIFFERENT` seconds are nobody's concern, whatever their ratio.

Looking again and again raises the chance of a false alarm. It stays below one in a hundred for a canary that
is as good as the primary (tests/gateway/test_judge.py tries that), because the limits leave room: a ratio of
1 is tested against 1.5. Times of requests that come together, as probes do, tell as much as one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from contracts.times import bucket_of, seconds_of
from gateway.fleet.statistics import (
    above,
    binomial_tail,
    fisher_tail,
    median_ratio,
    quantile,
    quantile_bucket,
    rank_sum,
)

Outcome = Literal["pass", "hold", "fail"]
Reference = Literal["same interval", "even load", "earlier steps", "before the rollout"]

ALPHA = 0.01
TAIL = 0.95
INDIFFERENT = {"ttft": 0.010, "tpot": 0.001}  # seconds
STEP_SHARE = 0.2  # of the least requests, those that each step must show anew
TESTABLE = 5  # times; fewer against as few can't reach ALPHA
_SEVERITY: dict[Outcome, int] = {"pass": 0, "hold": 1, "fail": 2}


class Limits(Protocol):
    """The fleet file's `judge:` block."""

    @property
    def min_requests(self) -> int: ...
    @property
    def max_error_rate(self) -> float: ...
    @property
    def max_ttft_ratio(self) -> float: ...
    @property
    def max_tpot_ratio(self) -> float: ...


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What one version did in an interval, its replicas and all gateways together.

    `requests`: ended ones, without those that the client left, that the gateway refused, or that the worker
    refused before it took them; users' and the judge's own probes alike. `errors`: of those, answers of 5xx,
    connections lost and streams broken off. `ttft`, `tpot`: bucket → number of requests, by their time to the
    first token and their mean time per further token (requests that had any). `crashes` of its processes.
    """

    requests: int = 0
    errors: int = 0
    ttft: dict[int, int] = {}
    tpot: dict[int, int] = {}
    crashes: int = 0

    def __add__(self, other: Window) -> Window:
        return _combine(self, other, 1)

    def __sub__(self, other: Window) -> Window:
        """What was counted between two readings of counters that only grow."""
        return _combine(self, other, -1)


def _combine(one: Window, other: Window, sign: int) -> Window:
    def times(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
        sums = {bucket: a.get(bucket, 0) + sign * b.get(bucket, 0) for bucket in a.keys() | b.keys()}
        return {bucket: count for bucket, count in sums.items() if count > 0}

    return Window(
        requests=max(0, one.requests + sign * other.requests),
        errors=max(0, one.errors + sign * other.errors),
        ttft=times(one.ttft, other.ttft),
        tpot=times(one.tpot, other.tpot),
        crashes=max(0, one.crashes + sign * other.crashes),
    )


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One question's numbers. `canary`, `primary`: error rates, or medians in seconds; None without samples.

    `ratio`: of the times; `tail`: the share of the canary's times above the limit times the primary's 95th
    percentile. `p`: the chance of numbers this bad, or worse, if the canary were just within the limit; None
    where there were too few to say.
    """

    name: Literal["error_rate", "ttft", "tpot", "crashes"]
    outcome: Outcome
    reason: str
    limit: float
    canary: float | None = None
    primary: float | None = None
    ratio: float | None = None
    tail: float | None = None
    p: float | None = None
    canary_samples: int = 0
    primary_samples: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` says in words what decided it; `measures` are all the numbers, also of what passed."""

    outcome: Outcome
    reason: str
    measures: tuple[Measure, ...] = ()
    reference: Reference = "same interval"


def step_least(limits: Limits) -> int:
    """How many requests each step must show by itself."""
    return min(limits.min_requests, max(TESTABLE, math.ceil(STEP_SHARE * limits.min_requests)))


def judge(
    canary: Window,
    primary: Window,
    limits: Limits,
    *,
    step: tuple[Window, Window] | None = None,
    together: int = 1,
    reference: Reference = "same interval",
    before: Verdict | None = None,
) -> Verdict:
    """The verdict on one interval; `before`: the last one on the same step, which stands if it is a failure.
    `step`: the present step's part of canary and primary, where these are of more than that. `together`: so
    many requests came at a time, and their times depend on each other: they may be worth as much as one.

    At 100 % the primary has no users to be compared on. There, `primary` is what it did on earlier steps, or
    before the rollout, and `reference` says so.
    """
    if before is not None and before.outcome == "fail":
        return before
    measures = _measures(canary, primary, limits, limits.min_requests, together)
    if step is not None:
        of_step = _measures(*step, limits, step_least(limits), together)
        measures = tuple(map(_worse, measures, of_step))
    for outcome in ("fail", "hold"):
        reasons = [measure.reason for measure in measures if measure.outcome == outcome]
        if reasons:
            reason = "; ".join(dict.fromkeys(reasons))
            return Verdict(outcome=outcome, reason=reason, measures=measures, reference=reference)
    return Verdict(outcome="pass", reason="within all limits", measures=measures, reference=reference)


def crashed(before: Verdict | None) -> Verdict:
    """The verdict on a canary that has crashed, whose numbers were those of `before`."""
    crash = _crashes(Window(crashes=1))
    rest = before.measures[1:] if before is not None else ()
    reference = before.reference if before is not None else "same interval"
    return Verdict(outcome="fail", reason=crash.reason, measures=(crash, *rest), reference=reference)


def mildest(verdicts: Iterable[Verdict]) -> Verdict:
    """The first of those that are least severe; there must be one."""
    return min(verdicts, key=lambda verdict: _SEVERITY[verdict.outcome])


def _measures(
    canary: Window, primary: Window, limits: Limits, least: int, together: int
) -> tuple[Measure, ...]:
    return (
        _crashes(canary),
        _errors(canary, primary, limits.max_error_rate, least),
        _times("ttft", canary.ttft, primary.ttft, limits.max_ttft_ratio, least, together),
        _times("tpot", canary.tpot, primary.tpot, limits.max_tpot_ratio, least, together),
    )


def _worse(whole: Measure, step: Measure) -> Measure:
    """Too few in all say nothing, whatever the step's say."""
    if whole.p is None or _SEVERITY[step.outcome] <= _SEVERITY[whole.outcome]:
        return whole
    return msgspec.structs.replace(step, reason=f"{step.reason}, on this step")


def _crashes(canary: Window) -> Measure:
    crashed = canary.crashes > 0
    return Measure(
        name="crashes",
        outcome="fail" if crashed else "pass",
        reason="the canary crashed" if crashed else "no crash",
        limit=0,
        canary=canary.crashes,
    )


def _errors(canary: Window, primary: Window, limit: float, least: int) -> Measure:
    n, errors = canary.requests, canary.errors
    rate = errors / n if n else None
    p = binomial_tail(errors, n, limit) if n >= least else None
    outcome: Outcome = "hold"
    if rate is None or p is None:
        reason = f"{n} of {least} requests seen by the canary"
    elif rate <= limit:
        outcome, reason = "pass", f"{errors} errors in {n} requests"
    elif p >= ALPHA:
        reason = f"{errors} errors in {n} requests are over {limit:.2%}, perhaps by chance"
    elif fisher_tail(errors, n, primary.errors, primary.requests) >= ALPHA and primary.errors:
        reason = f"the canary errs ({rate:.2%}), but so does the primary ({_rate(primary):.2%})"
    else:
        outcome = "fail"
        reason = f"the canary errs: {errors} of {n} requests, {rate:.2%}, limit {limit:.2%}"
    return Measure(
        name="error_rate",
        outcome=outcome,
        reason=reason,
        limit=limit,
        canary=rate,
        primary=_rate(primary) if primary.requests else None,
        p=p,
        canary_samples=n,
        primary_samples=primary.requests,
    )


def _rate(window: Window) -> float:
    return window.errors / window.requests


_WORDS: dict[str, tuple[str, str]] = {
    "ttft": ("times to first token", "the canary's first tokens are late"),
    "tpot": ("times per token", "the canary's tokens are slow"),
}


def _times(
    name: Literal["ttft", "tpot"],
    canary: dict[int, int],
    primary: dict[int, int],
    limit: float,
    least: int,
    together: int,
) -> Measure:
    """Compares two histograms: see the module."""
    n, m = sum(canary.values()), sum(primary.values())
    plural, late = _WORDS[name]
    seen = Measure(
        name=name,
        outcome="hold",
        reason=f"{n} of the canary's and {m} of the primary's {plural} seen, {least} needed of each",
        limit=limit,
        canary=quantile(canary, 0.5),
        primary=quantile(primary, 0.5),
        canary_samples=n,
        primary_samples=m,
    )
    if n < least or m < least or not (n and m):
        return seen

    def allowed(bucket: int) -> int:
        seconds = seconds_of(bucket)
        return bucket_of(max(seconds * limit, seconds + INDIFFERENT[name]))

    share, p = rank_sum(canary, primary, allowed, together)
    edge = quantile_bucket(primary, TAIL)
    slow, slow_before = above(canary, allowed(edge)), above(primary, edge)
    tail = slow / n
    p_tail = fisher_tail(*(round(count / together) for count in (slow, n, slow_before, m)))
    ratio = median_ratio(canary, primary)
    slower = f"{late}: {ratio:.2f} times the primary's, limit {limit:g}"
    straggling = f"{late}: {tail:.0%} are over {limit:g} times the primary's 95th percentile"
    findings = [(slower, p)] * (share > 0.5) + [(straggling, p_tail)] * (tail > 1 - TAIL and slow > together)
    outcome: Outcome = "pass"
    reason = f"{plural}: {ratio:.2f} times the primary's"
    if findings:
        reason, chance = min(findings, key=lambda finding: finding[1])
        outcome = "fail" if chance < ALPHA else "hold"
        reason += ", perhaps by chance" * (chance >= ALPHA)
    return msgspec.structs.replace(
        seen, outcome=outcome, reason=reason, ratio=ratio, tail=tail, p=min(p, p_tail)
    )
