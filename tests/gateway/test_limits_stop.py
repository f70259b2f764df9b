"""A gateway that stops: what its users have spent stays spent in Redis, and what they hold is free."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.limits import Charge, Granted, Kind, Limit, Refused
from gateway.limits.redis_limiter import RedisLimiter
from tests.gateway.redis_server import running
from tests.gateway.rig import one_worker, until

pytestmark = pytest.mark.redis
BOUNDS: dict[str, Any] = {"qps": 0.001, "burst": 5, "concurrency": 3, "tokens_per_minute": 6000}
RESERVED = 1000


async def test_a_stop_refunds_nothing_that_was_begun(tmp_path: Path) -> None:
    """Else whoever can make gateways restart has no limits: streams that it cuts off were worked on."""
    began = time.monotonic()
    with running(tmp_path / "redis") as server:
        limits = {"default": BOUNDS, "redis_timeout": 20}
        async with one_worker(tmp_path, redis_url=server.url, limits=limits) as rig:
            body = {"model": "m", "max_tokens": RESERVED, "user": "ann"}
            assert (await rig.post(body)).status_code == 200
            stream = {**body, "stream": True, "fake": {"do": "sse", "gate_at": 0}}
            whole = {**body, "fake": {"do": "sse", "gate_at": 0}}
            cut = [asyncio.create_task(rig.post(one)) for one in (stream, stream, whole)]
            await until(lambda: rig.inflight() == 3)
            rig.server.should_exit = True
            answers = await asyncio.gather(*cut, return_exceptions=True)
            assert any(isinstance(answer, httpx.Response) for answer in answers)
        limiter = RedisLimiter(server.url, budget=20)
        await limiter.start()
        charges = [Charge.of_user("ann", Limit(**BOUNDS))]
        last = await limiter.acquire(charges, 1)
        assert isinstance(last, Granted)
        left = {quota.kind: quota.remaining for quota in last.quotas()}
        assert left[Kind.REQUESTS] == 0
        # The fake worker keeps no usage: what was reserved counts, less what drains meanwhile.
        assert left[Kind.TOKENS] <= 6000 - 4 * RESERVED + 100 * (time.monotonic() - began)
        assert left[Kind.CONCURRENCY] == 2
        assert isinstance(await limiter.acquire(charges, 1), Refused)
        await limiter.aclose()
