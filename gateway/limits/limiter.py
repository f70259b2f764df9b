"""What is limited, and what an answer looks like: the interface of both limiters."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from gateway.limits.rules import MINUTE, SECOND, Kind, LeaseRule, Rate, RateRule, Rule, Scope

# While Redis can't be asked: a part of the limits in memory, no limits, or no requests.
Policy = Literal["local", "open", "closed"]

LONGEST_BURST_S = 31 * 86400
MOST_TOKENS = 10**9  # a minute
_TOKENS = Kind.TOKENS  # to look up a member takes as long as all else that `settle` does
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._@:/+-]{1,80}")


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of one user, key or model; None: no such bound. Build it once and keep it.

    `qps` requests a second, and `burst` at once (default: what a second allows, at least 1); `concurrency`
    requests in flight; `tokens_per_minute`, prompt and answer together, as many at once. Raises ValueError
    naming the field.
    """

    qps: float | None = None
    burst: int | None = None
    concurrency: int | None = None
    tokens_per_minute: int | None = None
    requests: Rate | None = field(init=False, repr=False, compare=False, default=None)
    tokens: Rate | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.qps is not None:
            object.__setattr__(self, "requests", _request_rate(self.qps, self.burst))
        elif self.burst is not None:
            raise ValueError("burst has a meaning only beside qps; set qps too or leave burst out")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.tokens_per_minute is not None:
            if not 1 <= self.tokens_per_minute <= MOST_TOKENS:
                raise ValueError(f"tokens_per_minute must be from 1 to 10^9, not {self.tokens_per_minute}")
            rate = Rate.of(self.tokens_per_minute, MINUTE, self.tokens_per_minute)
            object.__setattr__(self, "tokens", rate)

    @property
    def bounds_anything(self) -> bool:
        return self.requests is not None or self.concurrency is not None or self.tokens is not None

    def shared(self, gateways: int) -> Limit:
        """One gateway's part where `gateways` can't see each other's counts; whole numbers stay over 0."""
        if gateways <= 1:
            return self
        qps, burst = self.qps, _part(self.requests.burst if self.requests else None, gateways)
        if qps is not None and burst is not None:
            qps = max(qps / gateways, 1.01 * burst / LONGEST_BURST_S)
        return replace(
            self,
            qps=qps,
            burst=burst,
            concurrency=_part(self.concurrency, gateways),
            tokens_per_minute=_part(self.tokens_per_minute, gateways),
        )


def _part(whole: int | None, gateways: int) -> int | None:
    return None if whole is None else max(1, whole // gateways)


def _request_rate(qps: float, burst: int | None) -> Rate:
    if not 0 < qps <= SECOND:
        raise ValueError(f"qps must be more than 0 and at most 1000000, not {qps}")
    if burst is None:
        burst = max(1, math.ceil(qps))
    if burst < 1:
        raise ValueError(f"burst must be at least 1, not {burst}")
    if burst / qps > LONGEST_BURST_S:
        raise ValueError(
            f"burst {burst} at qps {qps:g} takes over 31 days to come back; raise qps or lower burst"
        )
    return Rate.of(1, math.ceil(SECOND / qps), burst)


_Compiled = tuple[tuple[Rule, ...], Callable[[int], RateRule] | None]


def _plain(name: str) -> str:
    """A name as part of a Redis key: short, and without braces, which would move the hash tag."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "~" + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Charge:
    """One subject that a request is charged to. A request's charges name distinct subjects. Any name will do.

    Make it once and keep it. `group`: charges of one group live in one slot of a Redis Cluster and are
    decided together there; a user and the user's keys share one.
    """

    scope: Scope
    name: str
    limit: Limit
    group: str
    _rules: dict[int, _Compiled] = field(init=False, repr=False, compare=False, default_factory=dict)

    def rules(self, gateways: int) -> _Compiled:
        """Made once for each number of gateways: a charge serves many requests."""
        rules = self._rules.get(gateways)
        if rules is None:
            rules = self._rules[gateways] = _compiled(self, gateways)
        return rules

    @classmethod
    def of_user(cls, user: str, limit: Limit) -> Charge:
        name = _plain(user)
        return cls(Scope.USER, name, limit, "u:" + name)

    @classmethod
    def of_key(cls, key_id: str, user: str, limit: Limit) -> Charge:
        return cls(Scope.KEY, _plain(key_id), limit, "u:" + _plain(user))

    @classmethod
    def of_model(cls, model: str, limit: Limit) -> Charge:
        name = _plain(model)
        return cls(Scope.MODEL, name, limit, "m:" + name)


def _compiled(charge: Charge, gateways: int) -> _Compiled:
    """The rules that are the same for every request, and the one that depends on its tokens."""
    whole, limit = charge.limit, charge.limit.shared(gateways)
    stem = f"{{{charge.group}}}:{charge.scope}:{charge.name}:"
    fixed: list[Rule] = []
    if (rate := limit.requests) is not None and whole.requests is not None:
        key = stem + Kind.REQUESTS
        fixed.append(RateRule(key, charge.scope, Kind.REQUESTS, rate, 1, rate.cost(1), whole.requests))
    if limit.concurrency is not None and whole.concurrency is not None:
        key = stem + Kind.CONCURRENCY
        fixed.append(LeaseRule(key, charge.scope, limit.concurrency, whole.concurrency))
    if limit.tokens is None or whole.tokens is None:
        return tuple(fixed), None
    token_key, part, all_tokens = stem + Kind.TOKENS, limit.tokens, whole.tokens

    def token_rule(units: int) -> RateRule:
        # What fits the whole limit must pass by one gateway's part too, or it never could.
        counted = min(units, part.burst) if units <= all_tokens.burst else units
        cost = part.cost(counted)
        return RateRule(token_key, charge.scope, Kind.TOKENS, part, units, cost, all_tokens)

    return tuple(fixed), token_rule


def rules_of(charges: Sequence[Charge], tokens: int, gateways: int = 1) -> tuple[Rule, ...]:
    """What a request of `tokens` (its prompt and all that it may generate) must pass."""
    tokens = max(tokens, 0)  # some clients write -1 where they mean no bound
    if len(charges) == 1:
        rules, token_rule = charges[0].rules(gateways)
        return rules if token_rule is None else (*rules, token_rule(tokens))
    rules = ()
    for charge in charges:
        fixed, token_rule = charge.rules(gateways)
        rules += fixed
        if token_rule is not None:
            rules += (token_rule(tokens),)
    return rules


class Quota(NamedTuple):
    """Where one limit stands. `reset`: seconds until all of `limit` is there again."""

    scope: Scope
    kind: Kind
    limit: int
    remaining: int
    reset: float


def quota(rule: Rule, value: int) -> Quota:
    limit, remaining, reset = rule.view(value)
    return Quota(rule.scope, rule.kind, limit, remaining, reset / SECOND)


class Books(Protocol):
    """Where a granted request is written down."""

    def adjust(self, rule: RateRule, delta: int) -> None: ...

    def drop(self, rules: Sequence[Rule], lease: str) -> None: ...


class Granted:
    """A request that may run. Its methods neither wait nor fail; each counts once."""

    __slots__ = ("_books", "_lease", "_released", "_settled", "_values", "rules")

    def __init__(self, books: Books, rules: Sequence[Rule], values: Sequence[int], lease: str) -> None:
        self.rules = rules
        self._books = books
        self._values = values
        self._lease = lease
        self._settled = False
        self._released = False

    def quotas(self) -> list[Quota]:
        """Every limit that was charged, after that."""
        return [quota(rule, value) for rule, value in zip(self.rules, self._values, strict=True)]

    def tightest(self) -> Iterable[tuple[RateRule, int, int]]:
        """Of the limits that were charged, those with the least left, at most one of requests and one of
        tokens: with their backlog, and how many are left."""
        found: dict[Kind, tuple[RateRule, int, int]] = {}
        for rule, value in zip(self.rules, self._values):
            if isinstance(rule, RateRule):
                kind, left = rule.kind, rule.rate.left(value)
                if kind not in found or left < found[kind][2]:
                    found[kind] = rule, value, left
        return found.values()

    def settle(self, tokens: int) -> None:
        """Replaces the reservation by the tokens used, prompt and answer; an aborted request's too."""
        if not self._settled:
            self._settled = True
            for rule in self.rules:
                if rule.kind is _TOKENS and isinstance(rule, RateRule):
                    self._change(rule, rule.rate.cost(max(tokens, 0)))

    def release(self) -> None:
        """Ends the request: its slots are free."""
        if not self._released:
            self._released = True
            self._books.drop(self.rules, self._lease)

    def give_back(self) -> None:
        """Undoes all of it, for a request that was refused elsewhere before any work was done."""
        for rule in self.rules:
            if isinstance(rule, RateRule) and not (rule.kind is Kind.TOKENS and self._settled):
                self._change(rule, 0)
        self._settled = True
        self.release()

    def _change(self, rule: RateRule, cost: int) -> None:
        if cost != rule.increment:
            self._books.adjust(rule, cost - rule.increment)


@dataclass(frozen=True, slots=True)
class Refused:
    """Over a limit: a 429. Nothing was consumed.

    `over`: the limit that takes longest to allow this request. `retry_after`: seconds until it would pass if
    nothing else arrived; for requests in flight, whose end nobody knows, one second; None: it asks for more
    than the limit ever allows.
    """

    over: Quota
    retry_after: float | None
    message: str
    quotas: tuple[Quota, ...]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Limits can't be checked now and the policy is `closed`: a 503."""

    retry_after: float


@dataclass(frozen=True, slots=True)
class LimiterState:
    """For metrics and logs. `degraded`: the policy decides instead of Redis, for `reason`; `gateways`: last
    number known to share the limits; `faults` of Redis since the start."""

    degraded: bool
    reason: str | None
    gateways: int
    faults: int


class Limiter(Protocol):
    """Both limiters. `tokens`: prompt and `max_tokens`, reserved until `settle`."""

    @property
    def state(self) -> LimiterState: ...

    async def start(self) -> None: ...

    async def acquire(
        self, charges: Sequence[Charge], tokens: int = 0
    ) -> Granted | Refused | Unavailable: ...

    async def aclose(self) -> None: ...


def refusal(rules: Sequence[Rule], values: Sequence[int]) -> Refused:
    """What to say of rules of which at least one doesn't admit its value."""
    over = [pair for pair in zip(rules, values, strict=True) if not pair[0].admits(pair[1])]
    rule, value = max(over, key=lambda pair: math.inf if (wait := pair[0].wait(pair[1])) is None else wait)
    wait = rule.wait(value)
    named = quota(rule, value)
    retry_after = None if wait is None else max(wait, 1) / SECOND
    quotas = tuple(quota(*pair) for pair in zip(rules, values, strict=True))
    return Refused(named, retry_after, _message(rule, named, retry_after), quotas)


def _message(rule: Rule, named: Quota, retry_after: float | None) -> str:
    line = f"Over the {rule.scope}'s limit of {rule}"
    if isinstance(rule, RateRule) and rule.kind is Kind.TOKENS:
        line += f": the request comes to {rule.units}, {named.remaining} are left"
    if retry_after is None:
        return line + "; a request of this size never passes."
    return line + f"; try again in {math.ceil(retry_after * 1000) / 1000:g} s."
