"""Clocks of Redis that were ahead or jump: nobody is locked out, and slots are right again."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from gateway.limits import Granted, Refused
from gateway.limits.redis_link import SCRIPT
from tests.gateway.redis_limits import key, limiting, of
from tests.gateway.redis_server import RedisServer

pytestmark = pytest.mark.redis


async def test_leases_of_a_clock_that_was_ahead_block_nobody(server: RedisServer) -> None:
    """Those of a gateway that was killed before the clock went back would for as long as it was ahead."""
    async with limiting(server.url) as limiter:
        charges = of("ann", concurrency=1)
        with server.client() as client:
            client.zadd(key("ann", "concurrency"), {"dead.1": (time.time() + 86400) * 1e6})
        held = await limiter.acquire(charges)
        assert isinstance(held, Granted)
        assert isinstance(await limiter.acquire(charges), Refused)


class Clock:
    """What the script takes for the server's time, in seconds."""

    script = SCRIPT.replace("redis.call('TIME')", "{redis.call('GET', 'clock'), 0}")

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.set(1_800_000_000)

    def set(self, now: int) -> None:
        self.now = now
        with self._server.client() as client:
            client.set("clock", now)


@pytest.mark.parametrize("jump", [-3600, -90, -20, 3600])
async def test_a_clock_that_jumps_locks_nobody_out(server: RedisServer, jump: int) -> None:
    """Also users whose burst takes an hour to come back wait no longer than they would have."""
    clock = Clock(server)
    limits: list[dict[str, Any]] = [
        {"qps": 1, "burst": 10},
        {"qps": 0.01, "burst": 36},
        {"tokens_per_minute": 600},
    ]
    async with limiting(server.url, script=clock.script) as limiter:
        for number, bounds in enumerate(limits):
            charges = of(f"u{number}", **bounds)
            while isinstance(await limiter.acquire(charges, 60), Granted):
                pass
            before = await limiter.acquire(charges, 60)
            assert isinstance(before, Refused)
            clock.set(clock.now + jump)
            after = await limiter.acquire(charges, 60)
            assert before.retry_after is not None
            if jump > 0:
                assert isinstance(after, Granted)
                continue
            assert isinstance(after, Refused)
            assert after.retry_after == before.retry_after
            clock.set(
                clock.now + math.ceil(before.retry_after)
            )  # and that time goes by, though it is refused
            assert isinstance(await limiter.acquire(charges, 60), Granted)


@pytest.mark.parametrize("jump", [-3600, -20, 3600])
async def test_slots_are_right_again_after_a_jump_of_the_clock(server: RedisServer, jump: int) -> None:
    clock = Clock(server)
    async with limiting(server.url, script=clock.script) as limiter:
        charges = of("ann", concurrency=2)
        held = [await limiter.acquire(charges) for _ in range(2)]
        clock.set(clock.now + jump)
        await limiter.renew()
        assert isinstance(await limiter.acquire(charges), Refused)
        assert limiter.state.gateways == 1
        for one in held:
            assert isinstance(one, Granted)
            one.release()
        assert isinstance(await limiter.acquire(charges), Granted)
