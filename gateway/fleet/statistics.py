"""The tests by which two sets of times in buckets, or two counts of errors, are compared.

Why these: gateway/fleet/judge.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

from contracts.times import BUCKETS_PER_DOUBLING, seconds_of


def above(times: dict[int, int], edge: int) -> int:
    """How many lie in buckets over `edge`."""
    return sum(count for bucket, count in times.items() if bucket > edge)


def quantile_bucket(times: dict[int, int], share: float) -> int:
    """The bucket of the smallest time that `share` of all don't exceed."""
    rank = share * sum(times.values())
    seen, bucket = 0, 0
    for bucket in sorted(times):
        seen += times[bucket]
        if seen >= rank:
            break
    return bucket


def quantile(times: dict[int, int], share: float) -> float | None:
    """In seconds, within 2.2 %; None without samples."""
    return seconds_of(quantile_bucket(times, share)) if times else None


def median_ratio(canary: dict[int, int], primary: dict[int, int]) -> float:
    """The median of canary/primary over all pairs of samples (Hodges-Lehmann, of the logarithms)."""
    buckets = sorted(primary)
    up_to = [0, *accumulate(primary[bucket] for bucket in buckets)]
    half = sum(canary.values()) * up_to[-1] / 2

    def reaches_half(shift: int) -> bool:
        """Whether at most `shift` buckets lie between canary and primary in half of all pairs."""
        return half <= sum(
            count * (up_to[-1] - up_to[bisect_left(buckets, bucket - shift)])
            for bucket, count in canary.items()
        )

    shifts = range(min(canary) - buckets[-1], max(canary) - buckets[0] + 1)
    shift = shifts[bisect_left(shifts, True, key=reaches_half)]
    return float(2.0 ** (shift / BUCKETS_PER_DOUBLING))


def rank_sum(
    canary: dict[int, int], primary: dict[int, int], allowed: Callable[[int], int], together: int = 1
) -> tuple[float, float]:
    """(share, p) of the canary's times against what is `allowed` for the primary's.

    `share`: of all pairs those in which the canary's is the longer, ties by half. `p`: the one-sided chance
    of such a share or more if both were alike, by the normal approximation with ties and continuity
    corrected; it errs towards 1 where samples are few (5 against 5 can just reach 0.01, 4 against 4 can't).
    `together`: so many samples come at a time and may be as good as one (the design effect of clusters:
    Kish, Survey Sampling, 1965); p is then that of so many times fewer.
    """
    other: dict[int, int] = {}
    for bucket, count in primary.items():
        other[allowed(bucket)] = other.get(allowed(bucket), 0) + count
    n, m = sum(canary.values()), sum(other.values())
    below, u, ties = 0, 0.0, 0
    for bucket in sorted(canary.keys() | other.keys()):
        mine, theirs = canary.get(bucket, 0), other.get(bucket, 0)
        u += mine * (below + theirs / 2)
        below += theirs
        ties += (mine + theirs) ** 3 - (mine + theirs)
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    share = u / (n * m)
    if variance <= 0:  # all in one bucket
        return share, 1.0
    z = (u - n * m / 2 - 0.5) / math.sqrt(variance * together)
    return share, 0.5 * math.erfc(z / math.sqrt(2))


def binomial_tail(successes: int, n: int, p: float) -> float:
    """The chance of `successes` or more in `n` trials of probability `p`, exact."""
    if successes <= 0 or p >= 1:
        return 1.0
    if p <= 0:
        return 0.0
    term = _log_choose(n, successes) + successes * math.log(p) + (n - successes) * math.log1p(-p)
    return _tail(term, successes, n, lambda k: (n - k) / (k + 1) * p / (1 - p))


def fisher_tail(a: int, n: int, b: int, m: int) -> float:
    """The chance of `a` or more of `a + b` hits among the first `n` of `n + m`, exact (hypergeometric)."""
    hits = a + b
    if a <= max(0, hits - m):
        return 1.0
    term = _log_choose(n, a) + _log_choose(m, b) - _log_choose(n + m, hits)
    last = min(hits, n)
    return _tail(term, a, last, lambda k: (n - k) * (hits - k) / ((k + 1) * (m - hits + k + 1)))


def _tail(log_term: float, first: int, last: int, step: Callable[[int], float]) -> float:
    """Sums the terms from `first` to `last`, each `step` times its predecessor, as far as they matter."""
    term, total = 1.0, 1.0
    for k in range(first, last):
        growth = step(k)
        term *= growth
        total += term
        if growth < 1 and term < 1e-12 * total:
            break
    return min(1.0, math.exp(min(0.0, log_term + math.log(total))))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
