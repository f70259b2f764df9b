"""Limiters on a real Redis, and the owner of a bare link to one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from gateway.limits import Charge, Limit
from gateway.limits import redis_channel as channels
from gateway.limits.redis_channel import RedisChannel
from gateway.limits.redis_limiter import RedisLimiter
from gateway.limits.redis_link import Operation

PATIENT = 20.0  # seconds that Redis has where it is well, however busy the machine is


@contextlib.asynccontextmanager
async def limiting(url: str, **options: Any) -> AsyncIterator[RedisLimiter]:
    limiter = RedisLimiter(url, **{"budget": PATIENT, **options})
    await limiter.start()
    try:
        yield limiter
    finally:
        await limiter.aclose()


def of(user: str, **bounds: Any) -> list[Charge]:
    return [Charge.of_user(user, Limit(**bounds))]


def key(user: str, kind: str) -> str:
    return f"pagefleet:{{u:{user}}}:user:{user}:{kind}"


class Owner:
    """Asks for something as soon as Redis is well, as a limiter renews its leases."""

    channel: RedisChannel | None = None

    def lost(self, operation: Operation) -> None: ...

    def unwanted(self, operation: Operation, answer: list[int]) -> None: ...

    async def well_again(self) -> None:
        if self.channel is not None:
            with contextlib.suppress(channels.RedisFault):
                await self.channel.ask(Operation(["{k}"], ["hold"], 1))
