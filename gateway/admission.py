"""Limits in front of the workers: which a request must pass, and what its client is told about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from contracts.errors import ApiError, unavailable
from contracts.units import format_duration
from gateway.identity.identity import Identity
from gateway.limits import Granted, Kind, Limiter, MemoryLimiter, Policy, Refused, Scope, Unavailable
from gateway.limits.estimate import explanation, reservation
from gateway.limits.live import LiveOverrides
from gateway.limits.overrides import FILE, OverridesFile
from gateway.limits.rules import SECOND
from gateway.limits.table import BoundSettings, LimitTable, Plan
from gateway.metrics import Metrics

_NAMES = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset"))
    for kind in (Kind.REQUESTS, Kind.TOKENS)
}
# Until all is there again: less than a second, or more.
_SOON = {kind: b"%b: %%d\r\n%b: %%d\r\n%b: %%dms\r\n" % names for kind, names in _NAMES.items()}
_LATER = {kind: b"%b: %%d\r\n%b: %%d\r\n%b: %%b\r\n" % names for kind, names in _NAMES.items()}
_EMBEDDINGS = b"/v1/embeddings"
_WITHOUT_TOKENS = (b"/tokenize", b"/detokenize")  # nothing is generated there


class _GatewayLimits(Protocol):
    @property
    def default(self) -> BoundSettings: ...
    @property
    def on_redis_error(self) -> Policy: ...
    @property
    def redis_timeout(self) -> float: ...


class LimitedSettings(Protocol):
    """The part of the gateway's settings that is about limits."""

    @property
    def processes(self) -> int: ...
    @property
    def redis_url(self) -> str | None: ...
    @property
    def limits(self) -> _GatewayLimits: ...


class Limits(NamedTuple):
    """What a gateway needs to limit: which limits there are, who counts, and who hears of new ones."""

    table: LimitTable
    limiter: Limiter
    live: LiveOverrides


def open_limits(
    settings: LimitedSettings, models: Mapping[str, BoundSettings | None], state_dir: Path
) -> Limits:
    """As the fleet file says. RedisUrlError when it names a Redis that can't be one; whether it is there is
    found out later."""
    table = LimitTable(settings.limits.default, models)
    file = OverridesFile(state_dir / FILE)
    if settings.redis_url is None:
        limiter = MemoryLimiter()
        limiter.gateways = settings.processes  # processes that can't see each other get a part each
        return Limits(table, limiter, LiveOverrides(file, None, table.apply))
    # Only now: the client library takes a tenth of a second to load.
    from gateway.limits.redis_limiter import RedisLimiter
    from gateway.limits.redis_overrides import RedisOverrides

    shared = RedisOverrides(settings.redis_url)
    limits = settings.limits
    redis = RedisLimiter(
        settings.redis_url,
        on_error=limits.on_redis_error,
        gateways=settings.processes,
        budget=limits.redis_timeout,
    )
    return Limits(table, redis, LiveOverrides(file, shared, table.apply))


class Admission:
    """Limits of one gateway; `plan` says what a request must pass, if anything."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._table = limits.table
        self.configure = limits.table.configure
        self._limiter = limits.limiter
        self._live = limits.live
        self._refused = metrics.counter(
            "pagefleet_gateway_rate_limited_total",
            "Requests refused with 429, by whose limit it was.",
            ["scope"],
        )
        for scope in Scope:
            self._refused.inc((scope.value,), 0)
        metrics.gauge(
            "pagefleet_gateway_limits_degraded",
            "1 while limits are decided by gateway.limits.on_redis_error instead of in Redis.",
            lambda: [((), float(self._limiter.state.degraded))],
            combine=max,
        )

    async def start(self) -> None:
        """Returns when Redis has answered, or hasn't for a second."""
        await self._limiter.start()
        self._live.start()

    async def aclose(self) -> None:
        await self._live.aclose()
        await self._limiter.aclose()

    def plan(self, who: Identity, model: str) -> Plan:
        """By the limits that hold now."""
        self._live.look()
        return self._table.plan(who, model)

    async def admit(self, plan: Plan, path: bytes, body: bytes) -> Granted:
        """For a plan with charges. ApiError 429 over a limit, and then nothing was consumed; 503 when limits
        can't be checked and must be."""
        generates = plan.counts_tokens and not path.startswith(_WITHOUT_TOKENS)
        embeds = path.startswith(_EMBEDDINGS)
        tokens = reservation(body, embeds=embeds) if generates else 0
        answer = await self._limiter.acquire(plan.charges, tokens)
        if isinstance(answer, Granted):
            return answer
        if isinstance(answer, Refused):
            self._refused.inc((answer.over.scope.value,))
            made_of = explanation(body, embeds=embeds) if answer.over.kind is Kind.TOKENS else ""
            raise _over_limit(answer, made_of)
        raise _unchecked(answer)


def limit_lines(granted: Granted) -> bytes:
    """Headers `x-ratelimit-*`: where the limit stands that has the least left, of requests and of tokens."""
    lines = b""
    for rule, backlog, left in granted.tightest():
        if backlog < SECOND:
            lines += _SOON[rule.kind] % (rule.rate.burst, left, round(backlog / 1000))
        else:
            lines += _LATER[rule.kind] % (rule.rate.burst, left, _duration(backlog))
    return lines


def _duration(backlog: int) -> bytes:
    return format_duration(backlog / SECOND).encode()


def _over_limit(refused: Refused, made_of: str) -> ApiError:
    headers: dict[str, str] = {}
    for kind in (Kind.TOKENS, Kind.REQUESTS):
        quotas = [quota for quota in refused.quotas if quota.kind is kind]
        if quotas:
            named = refused.over if refused.over.kind is kind else min(quotas, key=lambda one: one.remaining)
            limit, remaining, reset = (name.decode() for name in _NAMES[kind])
            headers[limit] = str(named.limit)
            headers[remaining] = str(named.remaining)
            headers[reset] = format_duration(named.reset)
    wait = refused.retry_after
    if wait is None:
        headers["x-should-retry"] = "false"  # clients of OpenAI's SDK try no 429 again then
    else:
        headers["retry-after"] = str(max(1, math.ceil(wait)))
        headers["retry-after-ms"] = str(math.ceil(wait * 1000))
    return ApiError(
        429,
        f"{refused.message} {made_of}".rstrip(),
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=headers,
    )


def _unchecked(answer: Unavailable) -> ApiError:
    return unavailable(
        "Rate limits can't be checked now: Redis doesn't answer (gateway.limits.on_redis_error is closed); "
        "try again soon.",
        "limits_unavailable",
        answer.retry_after,
    )
