"""What is compared with what: users with users, or probes with probes, at a load that is fair to both.

Users' requests and probes aren't the same work, so times are never a mixture of one compared with a mixture
of the other; errors count wherever they happen. A version's times also depend on how many users it has just
now: that changes with each step, and one user alone, who asks without end, is always on one side.
"""

from __future__ import annotations

from gateway.fleet.driver.measure import Sample
from gateway.fleet.driver.probing import AT_ONCE
from gateway.fleet.judge import Limits, Reference, Verdict, Window, judge, mildest, step_least


def users_tell(canary: Sample, primary: Sample, before: Sample, limits: Limits, *, so_far: Sample) -> bool:
    """Whether there are enough of them to do without probes."""
    return canary.has_users(limits) and any(old.has_users(limits) for old in (primary, so_far, before))


def verdict_on(
    canary: Sample,
    primary: Sample,
    before: Sample,
    limits: Limits,
    last: Verdict | None,
    *,
    so_far: Sample,
) -> Verdict:
    """On a step so far. Where the primary has too few users in it to be a measure (at 100 %, or when it is
    gone), there are two: what it did `so_far`, since the rollout began, at the present load but with a part
    of the users; and what it did `before`, in its life, with all of them, but mostly at another hour. Neither
    alone is fair, so a canary is as good as the kinder one says.
    """
    if users_tell(canary, primary, before, limits, so_far=so_far):
        others: list[tuple[Reference, Sample]] = [("before the rollout", before), ("earlier steps", so_far)]
        if primary.has_users(limits):
            others = [("same interval", primary)]
        return mildest(
            judge(canary.by_users(), old.by_users(), limits, reference=reference, before=last)
            for reference, old in others
            if old.has_users(limits)
        )
    if (primary.earlier + primary.probes).every.requests:
        return _by_probes(canary, primary, limits, last)
    return judge(
        canary.by_probes(),
        before.by_probes(),
        limits,
        together=AT_ONCE,
        reference="before the rollout",
        before=last,
    )


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
