"""Is Redis there? While it isn't, no rollout advances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.limits.redis_link import RedisLink

EVERY = 1.0  # seconds
ANSWER_WITHIN = 1.0
MISSED = 2  # pings in a row that say it is down


@asynccontextmanager
async def watch(url: str, tell: Callable[[bool], None]) -> AsyncIterator[None]:
    """Pings it once a second; `tell(True)` when it is down, `tell(False)` when it is back. The first finding
    is told in any case: what an earlier supervisor has found may no longer be so."""
    from gateway.limits.redis_link import RedisLink  # only where it is used: it takes long to load

    link = RedisLink(url)
    task = asyncio.create_task(_ping(link, tell), name="redis")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.aclose()


async def _ping(link: RedisLink, tell: Callable[[bool], None]) -> None:
    missed = 0
    is_down: bool | None = None
    while True:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await link.execute("PING")
        except Exception:  # the client library's, the system's, or late: it isn't there
            missed += 1
            finding = True if missed >= MISSED else is_down
        else:
            missed, finding = 0, False
        if finding is not None and finding is not is_down:
            is_down = finding
            tell(is_down)
        await asyncio.sleep(EVERY)
