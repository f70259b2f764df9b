"""Rate limits: requests per second with bursts, tokens per minute, and requests in flight.

**Method.** Rates are metered by the generic cell rate algorithm (ITU-T I.371, annex A: the virtual scheduling
form). Its whole state is one instant, the theoretical arrival time TAT at which everything admitted so far
will have drained; a request that costs `increment` is admitted when `max(TAT, now) + increment - now` is at
most `tolerance`, the time that a full burst takes to drain. That several limits are checked before any is
charged, and that unused tokens are given back, is added here. Prior art for GCRA inside Redis: Brandur
Leach's redis-cell and go-redis/redis_rate. Requests in flight are leases in a sorted set, by expiry: one that
a killed gateway held returns by itself, which a counter can't do.

**Use.**

    from gateway.limits.redis_limiter import RedisLimiter      # loads the client library: where it is needed
    limiter = RedisLimiter("redis://127.0.0.1:6379/0")          # or MemoryLimiter()
    await limiter.start()
    charges = [Charge.of_user("ann", limit), Charge.of_model("llama", other)]
    answer = await limiter.acquire(charges, tokens=900)
    if isinstance(answer, Granted):
        try: ...
        finally:
            answer.settle(used)      # the tokens really used; without it the reservation counts
            answer.release()         # neither waits nor fails, so both are safe in `finally`

`Refused` becomes a 429, `Unavailable` a 503. All times are integer microseconds inside and seconds outside.
"""

from gateway.limits.limiter import (
    Charge,
    Granted,
    Limit,
    Limiter,
    LimiterState,
    Policy,
    Quota,
    Refused,
    Unavailable,
)
from gateway.limits.memory import MemoryLimiter
from gateway.limits.rules import Kind, Scope

__all__ = [
    "Charge",
    "Granted",
    "Kind",
    "Limit",
    "Limiter",
    "LimiterState",
    "MemoryLimiter",
    "Policy",
    "Quota",
    "Refused",
    "Scope",
    "Unavailable",
]
