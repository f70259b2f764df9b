"""Limits that several gateways share, counted in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Sequence

from gateway.limits.limiter import (
    Charge,
    Granted,
    LimiterState,
    Policy,
    Refused,
    Unavailable,
    refusal,
    rules_of,
)
from gateway.limits.memory import MemoryLimiter
from gateway.limits.redis_channel import LAST_RETRY_S, RedisChannel, RedisFault
from gateway.limits.redis_forms import Form, Forms
from gateway.limits.redis_link import SCRIPT, Operation, RedisLink, slot_tag
from gateway.limits.rules import SECOND, LeaseRule, RateRule, Rule, Scope, bounded

RENEWED_AT_ONCE = 32
BEAT_S = 1.0  # how old the number of gateways may be by which the policy `local` divides
GATEWAYS = "{gateways}"


class RedisLimiter:
    """Decides in Redis; while Redis can't be asked, by `on_error`. For one event loop.

    `local`: in memory, with limits divided by the number of gateways last seen; `open`: no limits; `closed`:
    `Unavailable`. Redis gets `budget` seconds; what it didn't answer by then the policy answers, and every
    request after it until a probe finds Redis well again. `lease_ttl`: seconds until the slots of a gateway
    that was killed are free. `prefix` tells fleets apart that share one Redis.

    All calls go one after another, each with all that waits by then: a request's slot is free again for the
    next one that this gateway sees, and a busy gateway makes fewer calls, not more.
    """

    def __init__(
        self,
        url: str,
        *,
        on_error: Policy = "local",
        gateways: int = 1,
        budget: float = 0.05,
        lease_ttl: float = 30.0,
        prefix: str = "pagefleet",
        script: str = SCRIPT,
    ) -> None:
        self._link = RedisLink(url, script)
        self._channel = RedisChannel(self._link, self, budget, f"{prefix}:{GATEWAYS}:probe")
        self._on_error = on_error
        self._ttl = lease_ttl
        self._ttl_us = math.ceil(lease_ttl * SECOND)
        self._prefix = prefix + ":"
        self._forms = Forms(self._prefix)
        self._local = MemoryLimiter()
        self._local.gateways = gateways
        self._counted = 0  # as of which fault the slots in memory are counted
        self._local_books = _LocalBooks(self._local, self)
        self._id = secrets.token_hex(8)
        self._numbers = itertools.count()
        # Requests in flight by lease; those that Redis doesn't know; and leases that it may hold in vain, by
        # key and name, with the time when they have expired there.
        self._running: dict[str, list[LeaseRule]] = {}
        self._only_here: set[str] = set()
        self._unfreed: dict[tuple[str, str], tuple[LeaseRule, float]] = {}
        self._renewal: asyncio.Task[None] | None = None

    @property
    def state(self) -> LimiterState:
        channel = self._channel
        return LimiterState(channel.degraded, channel.reason, self._local.gateways, channel.faults)

    @property
    def degraded(self) -> bool:
        """True while the policy decides instead of Redis."""
        return self._channel.degraded

    async def start(self) -> None:
        """Connects, and from then on renews leases. Redis that is away makes it degraded, not fail."""
        self._renewal = asyncio.create_task(self._keep_renewing())
        await self._channel.start()

    async def aclose(self) -> None:
        """Frees what this gateway holds and closes the connections."""
        if self._renewal is not None:
            self._renewal.cancel()
        for lease, rules in list(self._running.items()):
            self.drop(rules, lease)
        key = self._prefix + GATEWAYS
        self._channel.post(Operation([key], ["drop", key, 1, self._id], 0))
        await self._channel.aclose()

    async def acquire(self, charges: Sequence[Charge], tokens: int = 0) -> Granted | Refused | Unavailable:
        """One round trip (in a cluster one more for a model's limit)."""
        form = self._forms.of_charges(charges, tokens)
        if not form.rules:
            return Granted(self, (), (), "")
        if self._channel.reason is not None:
            return self._by_policy(charges, tokens)
        lease = f"{self._id}.{next(self._numbers)}"
        checked: Sequence[Rule] = form.rules
        try:
            if self._link.is_cluster:
                admitted, checked, values = await self._take_in_parts(form.rules, lease)
            else:
                admitted, *values = await self._take(form, lease)
        except RedisFault:
            return self._by_policy(charges, tokens)
        if not admitted:
            return refusal(checked, values)
        if form.leases:
            self._running[lease] = form.leases
        return Granted(self, checked, values, lease)

    async def renew(self) -> None:
        """Prolongs the leases of what runs here and counts the gateways; raises RedisFault.

        Leases that Redis lost or never saw are there again afterwards. Goes in parts, so that decisions
        needn't wait for all of it.
        """
        await self._beat()
        leases_of: dict[str, list[str]] = {}
        for lease, rules in self._running.items():
            for rule in rules:
                leases_of.setdefault(rule.key, []).append(lease)
        keys = list(leases_of)
        for start in range(0, len(keys), RENEWED_AT_ONCE):
            holds = []
            for key in keys[start : start + RENEWED_AT_ONCE]:
                leases = [lease for lease in leases_of[key] if lease in self._running]
                if leases:
                    self._only_here.difference_update(leases)
                    holds.append(self._hold(key, leases))
            await asyncio.gather(*holds)

    def adjust(self, rule: RateRule, delta: int) -> None:
        """For `Granted`. While Redis is away nothing is changed: what it holds drains within a burst."""
        if not self._channel.degraded:
            key, rate = self._prefix + rule.key, rule.rate
            words = ["adjust", key, bounded(delta), rate.unit, rate.tolerance]
            self._channel.post(Operation([key], words, 0))

    def drop(self, rules: Sequence[Rule], lease: str) -> None:
        """For `Granted`. While Redis is away the leases are kept in mind, and freed there later."""
        leases = self._running.pop(lease, None)
        if leases is None:
            return
        if self._channel.reason is not None:
            self._local.drop(leases, lease)
        if self._only_here and lease in self._only_here:
            self._only_here.discard(lease)
        else:
            self._free(leases, lease)

    def _free(self, leases: Sequence[LeaseRule], lease: str) -> None:
        for rule in leases:
            if self._channel.reason is not None:
                self._unfreed[rule.key, lease] = rule, time.monotonic() + self._ttl
            else:
                self._channel.drop(self._prefix + rule.key, lease, rule)

    def _by_policy(self, charges: Sequence[Charge], tokens: int) -> Granted | Refused | Unavailable:
        if self._on_error == "closed":
            return Unavailable(LAST_RETRY_S)
        if self._on_error == "open":
            return Granted(self._local_books, (), (), "")
        if self._counted != self._channel.faults:  # what runs since Redis was well counts here too
            self._counted = self._channel.faults
            self._local.recount(self._running.values())
        rules = rules_of(charges, tokens, self._local.gateways)
        admitted, values = self._local.take(rules)
        if not admitted:
            return refusal(rules, values)
        lease = f"{self._id}.{next(self._numbers)}"
        leases = [rule for rule in rules if isinstance(rule, LeaseRule)]
        if leases:
            self._running[lease] = leases
            self._only_here.add(lease)
        return Granted(self._local_books, rules, values, lease)

    async def _take_in_parts(
        self, rules: Sequence[Rule], lease: str
    ) -> tuple[int, Sequence[Rule], list[int]]:
        """(whether admitted, the rules that were looked at, what each stands at), in a cluster."""
        # The model's last: a user's flood must end at the user's own limit before it touches the others'.
        parts: dict[str, list[Rule]] = {}
        for rule in sorted(rules, key=lambda rule: rule.scope is Scope.MODEL):
            parts.setdefault(slot_tag(rule.key), []).append(rule)
        taken: list[Rule] = []
        values: list[int] = []
        try:
            for part in parts.values():
                flag, *found = await self._take(self._forms.of_rules(part), lease)
                if not flag:
                    self._undo(taken, lease)
                    return 0, part, found
                taken += part
                values += found
        except BaseException:
            self._undo(taken, lease)
            raise
        return 1, taken, values

    async def _take(self, form: Form, lease: str) -> list[int]:
        """1 or 0, and what each rule stands at."""
        count = len(form.rules)
        words = ["acquire", lease, self._ttl_us, count, *form.words]
        operation = Operation(form.keys, words, 1 + count, [lease], form.rules)
        answer = self._channel.ask(operation)
        try:
            return await answer
        except asyncio.CancelledError:  # the client left; an answer still to come is undone by the channel
            if not answer.cancelled() and answer.exception() is None:
                self.unwanted(operation, answer.result())
            raise

    def _undo(self, rules: Sequence[Rule], lease: str) -> None:
        for rule in rules:
            if isinstance(rule, RateRule):
                self.adjust(rule, -rule.increment)
            else:
                self._free((rule,), lease)

    def lost(self, operation: Operation) -> None:
        """It may have run, or run yet: Redis that was paused reads what was sent to it before."""
        rules = [rule for rule in operation.rules if isinstance(rule, LeaseRule)]
        for lease in operation.leases:
            self._free(rules, lease)

    def unwanted(self, operation: Operation, answer: list[int]) -> None:
        """Nobody waits for it any more."""
        if operation.rules and answer[0]:
            self._undo(operation.rules, operation.leases[0])

    async def well_again(self) -> None:
        """What happened meanwhile is made known to Redis."""
        unfreed, self._unfreed = self._unfreed, {}
        for (_, lease), (rule, expiry) in unfreed.items():
            if expiry > time.monotonic():
                self._free((rule,), lease)
        await self._renew_quietly()

    async def _keep_renewing(self) -> None:
        pause = self._ttl / 3
        beats = max(1, round(pause / BEAT_S))
        while True:
            for _ in range(beats):
                await asyncio.sleep(pause / beats)
                with contextlib.suppress(RedisFault):
                    await self._beat()
            await self._renew_quietly()

    async def _beat(self) -> None:
        """Says that this gateway lives, and counts those that do; raises RedisFault."""
        (count,) = await self._hold(GATEWAYS, [self._id])
        self._local.gateways = max(1, count)

    def _hold(self, name: str, leases: list[str]) -> asyncio.Future[list[int]]:
        """Asks how many there are, these prolonged."""
        key = self._prefix + name
        return self._channel.ask(Operation([key], ["hold", key, self._ttl_us, len(leases), *leases], 1))

    async def _renew_quietly(self) -> None:
        with contextlib.suppress(RedisFault):  # the repair renews
            await self.renew()


class _LocalBooks:
    """Where a request is written down that was granted while Redis was away."""

    def __init__(self, local: MemoryLimiter, limiter: RedisLimiter) -> None:
        self._local = local
        self._limiter = limiter

    def adjust(self, rule: RateRule, delta: int) -> None:
        self._local.adjust(rule, delta)

    def drop(self, rules: Sequence[Rule], lease: str) -> None:
        self._limiter.drop(rules, lease)
