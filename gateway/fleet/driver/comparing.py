"""What is compared with what: users with users, or probes with probes, at a load that is fair to both.

Users' requests and probes aren't the same work, so times are never a mixture of one compared with a mixture
of the other; errors count wherever they happen. A version's times also depend on how many users it has just
now: that changes with each step, and one user alone, who asks without end, is always on one side.
"""

from __future__ import annotations

from gateway.fleet.driver.measure import Sample
from gateway.fleet.driver.probing import AT_ONCE
from gateway.fleet.judge import Limits, Reference, Verdict, Window, judge, step_least


def users_tell(canary: Sample, primary: Sample, before: Sample, limits: Limits) -> bool:
    """Whether there are enough of them to do without probes."""
    return canary.has_users(limits) and (primary.has_users(limits) or before.has_users(limits))


def verdict_on(
    canary: Sample, primary: Sample, before: Sample, limits: Limits, last: Verdict | None
) -> Verdict:
    """On a step so far. Where the primary has too few users in it to be a measure (at 100 %, or when it is
    gone), what it did `before` is: in its life so far, when it carried the load that the canary has now."""
    if users_tell(canary, primary, before, limits):
        in_time = primary.has_users(limits)
        reference: Reference = "same interval" if in_time else "before the rollout"
        other = (primary if in_time else before).by_users()
        return judge(canary.by_users(), other, limits, reference=reference, before=last)
    if (primary.earlier + primary.probes).every.requests:
        return _by_probes(canary, primary, limits, last)
    known = before.by_probes()
    reference = "before the rollout"
    return judge(canary.by_probes(), known, limits, together=AT_ONCE, reference=reference, before=last)


def _by_probes(canary: Sample, primary: Sample, limits: Limits, last: Verdict | None) -> Verdict:
    """Fails by probes beside which the canary had no more users than the primary. It passes by these, by all
    of them, or, where it has more users, by the primary's of the steps before, when that had them."""

    def verdict(reference: Reference, even: bool = False, other: Window | None = None) -> Verdict:
        step, at_a_time = canary.by_probes(even), primary.by_probes(even)
        whole = step + canary.earlier.seen(even), at_a_time + primary.earlier.seen(even)
        pair = step, at_a_time if other is None else other
        return judge(*whole, limits, step=pair, together=AT_ONCE, reference=reference, before=last)

    verdicts = [verdict("same interval"), verdict("even load", even=True)]
    every, even = verdicts
    if even.outcome == "fail":
        return even
    earlier, least = primary.earlier.every, step_least(limits)
    has_more = canary.users.requests > primary.users.requests
    is_silent = sum(primary.probes.every.ttft.values()) < least <= sum(canary.probes.every.ttft.values())
    if earlier.requests >= least and (has_more or is_silent):
        verdicts.append(verdict("earlier steps", other=earlier))
    for one in verdicts:
        if one.outcome == "pass":
            return one
    return every if every.outcome == "hold" else even
