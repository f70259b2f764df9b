"""What a limit means, in memory and with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import Charge, Granted, Kind, Limit, Limiter, MemoryLimiter, Refused, Scope, redis_forms
from gateway.limits.limiter import rules_of
from gateway.limits.redis_limiter import RedisLimiter

SECOND = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> MemoryLimiter:
    return MemoryLimiter(clock=clock)


def ann(**bounds: Any) -> list[Charge]:
    return [Charge.of_user("ann", Limit(**bounds))]


async def granted(limiter: MemoryLimiter, charges: list[Charge], tokens: int = 0) -> Granted:
    answer = await limiter.acquire(charges, tokens)
    assert isinstance(answer, Granted), answer
    return answer


async def refused(limiter: MemoryLimiter, charges: list[Charge], tokens: int = 0) -> Refused:
    answer = await limiter.acquire(charges, tokens)
    assert isinstance(answer, Refused), answer
    return answer


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"burst": 3}, "burst has a meaning only beside qps"),
        ({"qps": 0}, "qps must be more than 0"),
        ({"qps": float("nan")}, "qps must be more than 0"),
        ({"qps": 2_000_000}, "at most 1000000"),
        ({"qps": 1, "burst": 0}, "burst must be at least 1"),
        ({"qps": 0.001, "burst": 10_000}, "over 31 days"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"tokens_per_minute": 0}, "tokens_per_minute must be from 1"),
    ],
)
def test_a_bound_that_means_nothing_is_refused_by_name(bounds: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Limit(**bounds)


async def test_a_burst_passes_at_once_and_comes_back_at_the_rate(
    limiter: MemoryLimiter, clock: Clock
) -> None:
    charges = ann(qps=10, burst=3)
    left = [(await granted(limiter, charges)).quotas()[0].remaining for _ in range(3)]
    assert left == [2, 1, 0]
    no = await refused(limiter, charges)
    assert (no.over.scope, no.over.kind, no.over.limit, no.over.remaining) == (
        Scope.USER,
        Kind.REQUESTS,
        3,
        0,
    )
    assert (no.over.reset, no.retry_after) == (0.3, 0.1)
    assert no.message == "Over the user's limit of 10 requests a second (burst 3); try again in 0.1 s."
    clock.forward(0.099_999)
    assert (await refused(limiter, charges)).retry_after == 0.000_001
    clock.forward(0.000_001)
    await granted(limiter, charges)
    await refused(limiter, charges)


async def test_a_refusal_consumes_nothing_of_any_limit(limiter: MemoryLimiter) -> None:
    ample = Limit(qps=10, burst=10, concurrency=10, tokens_per_minute=6000)
    charges = [
        Charge.of_user("ann", ample),
        Charge.of_key("k", "ann", ample),
        Charge.of_model("m", Limit(concurrency=1)),
    ]
    first = await granted(limiter, charges, 100)
    before = first.quotas()
    for _ in range(20):
        no = await refused(limiter, charges, 100)
        assert (no.over.scope, no.over.kind, no.retry_after) == (Scope.MODEL, Kind.CONCURRENCY, 1.0)
        assert [quota.remaining for quota in no.quotas] == [quota.remaining for quota in before]
    first.release()
    await granted(limiter, charges, 100)


async def test_the_limit_that_takes_longest_is_named(limiter: MemoryLimiter) -> None:
    charges = [
        Charge.of_user("ann", Limit(qps=10, burst=1)),
        Charge.of_key("k", "ann", Limit(qps=1, burst=1)),
    ]
    await granted(limiter, charges)
    no = await refused(limiter, charges)
    assert (no.over.scope, no.retry_after) == (Scope.KEY, 1.0)


async def test_tokens_are_reserved_and_settled_with_what_was_used(
    limiter: MemoryLimiter, clock: Clock
) -> None:
    charges = ann(tokens_per_minute=600)
    first = await granted(limiter, charges, 500)
    no = await refused(limiter, charges, 200)
    assert no.over.remaining == 100
    assert no.retry_after == 10  # 100 tokens at ten a second
    assert "200, 100 are left" in no.message
    first.settle(50)
    first.settle(0)  # counts once
    assert (await granted(limiter, charges, 500)).quotas()[0].remaining == 50
    clock.forward(60)
    assert (await granted(limiter, charges, 600)).quotas()[0].remaining == 0


async def test_tokens_used_beyond_the_reservation_are_owed_up_to_an_hours_worth(
    limiter: MemoryLimiter, clock: Clock
) -> None:
    charges = ann(tokens_per_minute=600)
    (await granted(limiter, charges, 10)).settle(900)
    assert (await refused(limiter, charges, 100)).retry_after == 40
    clock.forward(40)
    (await granted(limiter, charges, 100)).settle(10**6)
    assert (await refused(limiter, charges, 600)).retry_after == 3600


async def test_reserving_little_gets_nobody_more_than_the_limit(limiter: MemoryLimiter, clock: Clock) -> None:
    """Chats without max_tokens reserve 256 and may be as long as the model's context."""
    charges = ann(tokens_per_minute=600)
    used = 0
    for _ in range(60 * 60):
        answer = await limiter.acquire(charges, 10)
        if isinstance(answer, Granted):
            answer.settle(5000)
            answer.release()
            used += 5000
        clock.forward(1)
    assert used <= 60 * 600 + 600 + 5000


async def test_a_request_larger_than_the_limit_has_no_time_to_wait_for(limiter: MemoryLimiter) -> None:
    no = await refused(limiter, ann(tokens_per_minute=600), 601)
    assert no.retry_after is None
    assert no.message == (
        "Over the user's limit of 600 tokens a minute: the request comes to 601, 600 are left; a request of "
        "this size never passes."
    )


@pytest.mark.parametrize(
    ("bounds", "tokens", "words"),
    [
        ({"concurrency": 1}, 0, "1 request at a time;"),
        (
            {"concurrency": 3},
            0,
            "3 requests at a time, of which this gateway process counts a part by itself (1);",
        ),
        (
            {"tokens_per_minute": 200},
            500,
            "200 tokens a minute, of which this gateway process counts a part by itself (100): the request "
            "comes to 500, 0 are left; a request of this size never passes.",
        ),
        (
            {"qps": 4, "burst": 2},
            0,
            "4 requests a second (burst 2), of which this gateway process counts a part by itself (2 "
            "requests a second);",
        ),
    ],
)
async def test_whoever_counts_a_part_names_the_whole_limit(
    limiter: MemoryLimiter, bounds: dict[str, Any], tokens: int, words: str
) -> None:
    limiter.gateways = 2
    charges = ann(**bounds)
    await granted(limiter, charges, 200 if tokens else 0)
    no = await refused(limiter, charges, tokens)
    assert no.message.startswith(f"Over the user's limit of {words}"), no.message


async def test_a_negative_number_of_tokens_is_no_credit(limiter: MemoryLimiter) -> None:
    charges = ann(tokens_per_minute=600)
    (await granted(limiter, charges, -500)).settle(-500)
    assert (await granted(limiter, charges, 1)).quotas()[0].remaining == 599


async def test_what_is_given_back_was_never_taken(limiter: MemoryLimiter) -> None:
    charges = ann(qps=1, burst=1, concurrency=1, tokens_per_minute=60)
    for _ in range(5):
        taken = await granted(limiter, charges, 60)
        taken.give_back()
        taken.give_back()
        taken.release()
    (await granted(limiter, charges, 60)).release()
    assert (await refused(limiter, charges, 60)).over.kind in (Kind.REQUESTS, Kind.TOKENS)


async def test_a_changed_limit_holds_at_once(limiter: MemoryLimiter, clock: Clock) -> None:
    for _ in range(60):
        await granted(limiter, ann(qps=1, burst=60))
    clock.forward(1)
    # A hundred times the rate: the old backlog of 59 s counts as 59 requests, not as 59 s.
    assert (await granted(limiter, ann(qps=100, burst=100))).quotas()[0].remaining == 40
    # A burst of 2: it is used up, and is back after two seconds, not after a minute.
    assert (await refused(limiter, ann(qps=1, burst=2))).retry_after == 1.0
    clock.forward(1)
    await granted(limiter, ann(qps=1, burst=2))
    held = [await granted(limiter, ann(concurrency=5)) for _ in range(5)]
    assert (await refused(limiter, ann(concurrency=2))).over.limit == 2
    for one in held[:4]:
        one.release()
    await granted(limiter, ann(concurrency=2))


async def test_idle_entries_go_and_the_rest_is_bounded(clock: Clock) -> None:
    limiter = MemoryLimiter(clock=clock, max_entries=100)
    limit = Limit(qps=10, burst=10, concurrency=2, tokens_per_minute=600)
    for number in range(3_000):
        (await granted(limiter, [Charge.of_user(f"user{number}", limit)], 1)).release()
        assert len(limiter) <= 100
        clock.forward(0.01)
    clock.forward(60)
    for _ in range(60):
        (await granted(limiter, ann(concurrency=1))).release()
    assert len(limiter) == 0


@given(
    qps=st.floats(min_value=0.01, max_value=1e6),
    burst=st.integers(1, 1000),
    gateways=st.integers(1, 50),
    tokens=st.integers(1, 10**9),
)
def test_the_parts_of_all_gateways_come_to_no_more_than_the_whole(
    qps: float, burst: int, gateways: int, tokens: int
) -> None:
    whole = Limit(qps=qps, burst=burst, concurrency=burst, tokens_per_minute=tokens)
    part = whole.shared(gateways)
    assert part.qps == pytest.approx(qps / gateways)
    for of_part, of_whole in (
        (part.burst, burst),
        (part.concurrency, burst),
        (part.tokens_per_minute, tokens),
    ):
        assert of_part is not None
        assert of_part == 1 or of_part * gateways <= of_whole


async def test_what_fits_the_whole_limit_passes_by_a_gateways_part(limiter: MemoryLimiter) -> None:
    limiter.gateways = 3
    charges = ann(tokens_per_minute=900)
    await granted(limiter, charges, 800)
    await refused(limiter, charges, 1)
    assert (await refused(limiter, charges, 901)).retry_after is None


def test_names_can_neither_move_a_key_nor_make_it_long() -> None:
    keys = set()
    limit = Limit(qps=1)
    names = ("ann", "an}n", "{ann", "a" * 10_000, "", "ann:user:ann", "ä", "ann\n", "~x", "\ud800", "n" * 80)
    for name in names:
        (user,) = rules_of([Charge.of_user(name, limit)], 0)
        (key,) = rules_of([Charge.of_key("k", name, limit)], 0)
        assert user.key.count("{") == user.key.count("}") == 1
        assert user.key.split("}")[0] == key.key.split("}")[0]
        assert user.key.isascii()
        assert len(user.key) < 220
        keys |= {user.key, key.key}
    assert len(keys) == 2 * len(names)


async def test_both_limiters_are_the_same_to_their_users(limiter: MemoryLimiter) -> None:
    both: list[Limiter] = [limiter, RedisLimiter("unix:///nowhere")]
    for one in both:
        assert one.state.gateways == 1
        await one.aclose()


def test_what_is_said_of_callers_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_forms, "MAX_KNOWN", 10)
    forms = redis_forms.Forms("p:")
    for number in range(100):
        charges = (Charge.of_user(f"user {number}", Limit(qps=1)),)
        form = forms.of_charges(charges, 0)
        assert form is forms.of_charges(charges, 0)
        assert form.rules[0].key == f"{{{charges[0].group}}}:user:{charges[0].name}:requests"
        assert len(forms._known) <= 10
