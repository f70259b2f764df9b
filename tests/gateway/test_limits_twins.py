"""Random histories: Redis, memory and a plain model of a leaking bucket come to the same answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import Charge, Granted, Kind, Limit, MemoryLimiter, Refused, Unavailable
from gateway.limits.redis_limiter import RedisLimiter
from gateway.limits.redis_link import SCRIPT
from gateway.limits.rules import MOST_OWED
from tests.gateway.redis_server import running

pytestmark = pytest.mark.redis
T = TypeVar("T")
Answer = Granted | Refused | Unavailable
SECOND = 1_000_000
START = 1_700_000_000 * SECOND
# Rates whose intervals are whole microseconds, so that the model in fractions is exact.
LIMITS = [
    Limit(qps=2, burst=3, concurrency=2, tokens_per_minute=600),
    Limit(qps=1, burst=4, tokens_per_minute=300),
    Limit(qps=5, burst=5, concurrency=3),
    Limit(qps=4, burst=1, concurrency=1, tokens_per_minute=1200),
]


class Model:
    """Levels in requests and tokens that leak by the clock: nothing of GCRA in it."""

    def __init__(self) -> None:
        self.levels: dict[tuple[str, str], tuple[Fraction, int]] = {}
        self.running: dict[str, int] = {}

    def level(self, name: str, kind: str, now: int, rate: Fraction) -> Fraction:
        level, since = self.levels.get((name, kind), (Fraction(0), now))
        return max(Fraction(0), level - (now - since) * rate / SECOND)

    def margins(self, charges: list[Charge], tokens: int, now: int) -> list[Fraction]:
        """What would be left of each bound; below zero: over it."""
        found = []
        for name, kind, rate, burst, units in self.bounds(charges, tokens):
            self.levels[name, kind] = (
                min(self.level(name, kind, now, rate), MOST_OWED * Fraction(burst)),
                now,
            )
            found.append(burst - self.levels[name, kind][0] - units)
        for charge in charges:
            if charge.limit.concurrency is not None:
                name = f"{charge.scope}/{charge.name}"
                found.append(Fraction(charge.limit.concurrency - self.running.get(name, 0) - 1))
        return found

    @staticmethod
    def bounds(charges: list[Charge], tokens: int) -> Iterator[tuple[str, str, Fraction, int, int]]:
        for charge in charges:
            name, limit = f"{charge.scope}/{charge.name}", charge.limit
            assert limit.qps is not None
            assert limit.burst is not None
            yield name, "requests", Fraction(limit.qps), limit.burst, 1
            if limit.tokens_per_minute is not None:
                tpm = limit.tokens_per_minute
                yield name, "tokens", Fraction(tpm, 60), tpm, tokens

    def change(self, name: str, kind: str, now: int, rate: Fraction, burst: int, units: int) -> None:
        level = self.level(name, kind, now, rate)
        self.levels[name, kind] = (max(Fraction(0), min(level + units, MOST_OWED * Fraction(burst))), now)

    def run(self, charges: list[Charge], by: int) -> None:
        for charge in charges:
            if charge.limit.concurrency is not None:
                name = f"{charge.scope}/{charge.name}"
                self.running[name] = self.running.get(name, 0) + by


class Twins:
    """Both limiters under one clock that only moves when told to."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.names = itertools.count()
        self.now = START
        self.server = running(folder)
        redis = self.server.__enter__()
        self.client = redis.client()
        script = SCRIPT.replace("redis.call('TIME')", "redis.call('MGET', 'seconds', 'micros')")
        patient = script.replace("+ 1000)", "+ 600000)")  # keys live by the real clock
        assert SCRIPT != script != patient
        self.redis = RedisLimiter(redis.url, budget=30, lease_ttl=3600, script=patient)
        self.client.mset({"seconds": START // SECOND, "micros": START % SECOND})
        self.run(self.redis.start())
        assert not self.redis.degraded

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def close(self) -> None:
        self.run(self.redis.aclose())
        self.client.close()
        self.runner.close()
        self.server.__exit__(None, None, None)

    async def set_clock(self, now: int) -> None:
        await self.redis.renew()  # comes after all that was to be settled and released
        self.now = now
        self.client.mset({"seconds": now // SECOND, "micros": now % SECOND})


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    twins = Twins(tmp_path_factory.mktemp("twins"))
    yield twins
    twins.close()


step = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([1, 999, 100_000, 250_000, 499_999, SECOND, 7 * SECOND])),
    st.tuples(
        st.just("acquire"), st.integers(0, 1), st.integers(0, 1), st.integers(1, 320), st.integers(0, 3)
    ),
    st.tuples(st.just("acquire"), st.just(0), st.just(0), st.integers(1, 40), st.integers(0, 3)),
    st.tuples(
        st.just("acquire_at_once"), st.lists(st.integers(0, 1), min_size=2, max_size=6), st.integers(1, 99)
    ),
    st.tuples(st.just("settle"), st.integers(0, 99), st.sampled_from([0, 1, 40, 400, 3000, 30_000])),
    st.tuples(st.just("release"), st.integers(0, 99)),
    st.tuples(st.just("give_back"), st.integers(0, 99)),
)


class History:
    """Does the same to all three and compares."""

    def __init__(self, twins: Twins, changing: bool) -> None:
        self.twins = twins
        self.memory = MemoryLimiter(clock=lambda: twins.now)
        self.model = Model()
        self.stem = f"h{next(twins.names)}"
        self.changing = changing
        self.open: list[tuple[list[Charge], int, Granted, Granted]] = []

    async def play(self, steps: list[tuple[Any, ...]]) -> None:
        await self.twins.set_clock(START)
        for name, *args in steps:
            await getattr(self, name)(*args)
        for _, _, ours, theirs in self.open:
            ours.release()
            theirs.release()

    async def wait(self, microseconds: int) -> None:
        await self.twins.set_clock(self.twins.now + microseconds)

    async def acquire(self, user: int, key: int, tokens: int, shift: int) -> None:
        charges = self.charges(user, key, shift if self.changing else 0)
        ours = await self.memory.acquire(charges, tokens)
        self.compare(charges, tokens, ours, await self.twins.redis.acquire(charges, tokens))

    async def acquire_at_once(self, users: list[int], tokens: int) -> None:
        """One list of operations, also with what was posted before."""
        charges = [self.charges(user, 0, 0) for user in users]
        theirs = await asyncio.gather(*[self.twins.redis.acquire(one, tokens) for one in charges])
        for one, answer in zip(charges, theirs, strict=True):
            self.compare(one, tokens, await self.memory.acquire(one, tokens), answer)

    def charges(self, user: int, key: int, shift: int) -> list[Charge]:
        limits = [LIMITS[(place + shift) % len(LIMITS)] for place in range(3)]
        return [
            Charge.of_user(f"{self.stem}u{user}", limits[0]),
            Charge.of_key(f"{self.stem}u{user}k{key}", f"{self.stem}u{user}", limits[1]),
            Charge.of_model(f"{self.stem}m", limits[2]),
        ]

    def compare(self, charges: list[Charge], tokens: int, ours: Answer, theirs: Answer) -> None:
        assert not self.twins.redis.degraded
        if isinstance(ours, Refused):
            assert ours == theirs
        if not self.changing:
            margins = self.model.margins(charges, tokens, self.twins.now)
            assert isinstance(ours, Granted) == (min(margins) >= 0)
        if isinstance(ours, Granted):
            assert isinstance(theirs, Granted)
            assert ours.quotas() == theirs.quotas()
            self.open.append((charges, tokens, ours, theirs))
            for name, kind, rate, burst, units in Model.bounds(charges, tokens):
                self.model.change(name, kind, self.twins.now, rate, burst, units)
            self.model.run(charges, 1)

    async def settle(self, which: int, used: int) -> None:
        if self.open:
            charges, tokens, ours, theirs = self.open[which % len(self.open)]
            if not ours._settled:
                for name, kind, rate, burst, units in Model.bounds(charges, used - tokens):
                    if kind == Kind.TOKENS:
                        self.model.change(name, kind, self.twins.now, rate, burst, units)
            ours.settle(used)
            theirs.settle(used)

    async def release(self, which: int) -> None:
        if self.open:
            charges, _, ours, theirs = self.open.pop(which % len(self.open))
            self.model.run(charges, -1)
            ours.release()
            theirs.release()

    async def give_back(self, which: int) -> None:
        if self.open:
            charges, tokens, ours, theirs = self.open.pop(which % len(self.open))
            self.model.run(charges, -1)
            for name, kind, rate, burst, units in Model.bounds(charges, tokens):
                if kind == Kind.REQUESTS or not ours._settled:
                    self.model.change(name, kind, self.twins.now, rate, burst, -units)
            ours.give_back()
            theirs.give_back()


@settings(max_examples=70, deadline=None, database=None)
@given(steps=st.lists(step, min_size=12, max_size=40))
def test_random_histories_end_the_same_in_redis_in_memory_and_in_the_model(
    twins: Twins, steps: list[tuple[Any, ...]]
) -> None:
    twins.run(History(twins, changing=False).play(steps))


@settings(max_examples=50, deadline=None, database=None)
@given(steps=st.lists(step, min_size=12, max_size=40))
def test_random_histories_with_changing_limits_end_the_same_in_redis_and_in_memory(
    twins: Twins, steps: list[tuple[Any, ...]]
) -> None:
    twins.run(History(twins, changing=True).play(steps))


def test_a_redis_whose_clock_is_far_behind_its_predecessors_refuses_nobody_for_that(twins: Twins) -> None:
    async def history() -> None:
        charges = [Charge.of_user(f"h{next(twins.names)}", Limit(qps=1, burst=5, tokens_per_minute=600))]
        await twins.set_clock(START)
        first = await twins.redis.acquire(charges, 400)
        assert isinstance(first, Granted)
        await twins.set_clock(START - 3600 * SECOND)
        first.settle(300)
        second = await twins.redis.acquire(charges, 300)
        assert isinstance(second, Granted)
        assert [quota.remaining for quota in second.quotas()] == [3, 0]  # what was used before is used

    twins.run(history())
