"""The arithmetic that both limiters share: what a limit costs, leaves and makes a client wait.

A `RateRule`'s state is its *backlog*: microseconds until all that was admitted has drained (TAT - now). The
books (`limits.lua`, `memory.py`) only add and compare integers made here. A `LeaseRule`'s state is the number
of leases held.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

SECOND = 1_000_000
MINUTE = 60 * SECOND
# Times what a limit allows at once that may be owed, where requests took more than they had reserved: for
# tokens an hour's worth. Less than all would let whoever reserves little have more than the limit for ever.
MOST_OWED = 60
# A wait that nothing can foretell: a slot is free when somebody's request ends.
ASK_AGAIN = SECOND
_EXACT = 2**53  # what a double holds exactly; more than any limit, so a larger number means the same


class Scope(StrEnum):
    """Whose limit it is."""

    USER = "user"
    KEY = "key"
    MODEL = "model"


class Kind(StrEnum):
    """What is limited, as in the names of `x-ratelimit-*` headers."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Rate:
    """`amount` units in each `period` microseconds, and at most `burst` units at once."""

    amount: int
    period: int
    burst: int
    tolerance: int
    unit: int
    """Nanoseconds for one unit to drain: tells states apart that were written under another rate."""

    @classmethod
    def of(cls, amount: int, period: int, burst: int) -> Rate:
        tolerance = -(-burst * period // amount)
        return cls(amount, period, burst, tolerance, -(-1000 * period // amount))

    def cost(self, units: int) -> int:
        """Microseconds of backlog that `units` add; rounded up, so rounding never admits more."""
        return -(-units * self.period // self.amount)

    def left(self, backlog: int) -> int:
        """Units that could be taken at once."""
        free = self.tolerance - backlog
        return free * self.amount // self.period if free > 0 else 0


class RateRule(NamedTuple):  # made for every request that reserves tokens: a third of a dataclass's cost
    """One request's charge against one rate: `units` of it, `increment` microseconds."""

    key: str
    scope: Scope
    kind: Kind
    rate: Rate
    units: int
    increment: int
    whole: Rate
    """What people set; `rate` is a part of it where gateways can't see each other's counts."""

    def words(self, key: str) -> tuple[str | int, ...]:
        """As `limits.lua` reads it."""
        rate = self.rate
        return "rate", key, bounded(self.increment), rate.unit, rate.tolerance

    def admits(self, backlog: int) -> bool:
        return backlog + self.increment <= self.rate.tolerance

    def wait(self, backlog: int) -> int | None:
        """Microseconds until this charge fits; None: it is larger than the limit and never will."""
        if self.increment > self.rate.tolerance:
            return None
        return max(0, backlog + self.increment - self.rate.tolerance)

    def view(self, backlog: int) -> tuple[int, int, int]:
        """(limit, remaining, microseconds until all of it is there again)."""
        return self.rate.burst, self.rate.left(backlog), backlog

    def __str__(self) -> str:
        if self.kind is Kind.TOKENS:
            words, part = f"{_count(self.whole.amount, 'token')} a minute", f"{self.rate.amount}"
        else:
            words, part = f"{_a_second(self.whole)} (burst {self.whole.burst})", _a_second(self.rate)
        return _with_part(words, part, self.rate != self.whole)


@dataclass(frozen=True, slots=True)
class LeaseRule:
    """One request's slot among the `limit` that may be in flight."""

    key: str
    scope: Scope
    limit: int
    whole: int
    """What people set; `limit` may be a part of it, as with a RateRule."""
    kind: ClassVar[Kind] = Kind.CONCURRENCY

    def words(self, key: str) -> tuple[str | int, ...]:
        """As `limits.lua` reads it."""
        return "lease", key, bounded(self.limit)

    def admits(self, held: int) -> bool:
        return held < self.limit

    def wait(self, held: int) -> int | None:
        return ASK_AGAIN

    def view(self, held: int) -> tuple[int, int, int]:
        return self.limit, max(0, self.limit - held), ASK_AGAIN if held else 0

    def __str__(self) -> str:
        words = f"{_count(self.whole, 'request')} at a time"
        return _with_part(words, f"{self.limit}", self.limit != self.whole)


Rule = RateRule | LeaseRule


def _count(number: int | str, thing: str) -> str:
    return f"{number} {thing}{'' if str(number) == '1' else 's'}"


def _a_second(rate: Rate) -> str:
    return f"{_count(f'{SECOND / rate.period:.6g}', 'request')} a second"


def _with_part(words: str, part: str, parted: bool) -> str:
    return f"{words}, of which this gateway process counts a part by itself ({part})" if parted else words


def bounded(number: int) -> int:
    """As large as `limits.lua` can take it: clients and workers may name any number."""
    return max(-_EXACT, min(number, _EXACT))


def present_backlog(backlog: int, unit: int, tolerance: int, rate: Rate) -> int:
    """A stored backlog as the rate of now sees it; `unit`, `tolerance`: of the rate it was stored under.

    After a change of the limit, as many units count as used as before, but never more than a whole burst: so
    a change holds at once, both ways. `limits.lua` does the same, in the same order, on IEEE doubles too.
    """
    if backlog <= 0:
        return 0
    if unit != rate.unit or tolerance != rate.tolerance:
        scaled = float(backlog) * float(rate.unit) / float(unit)
        return int(min(-(-scaled // 1), rate.tolerance))
    return backlog
