"""Limits of one process, kept in its memory: the twin of `limits.lua`."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from gateway.limits.limiter import Charge, Granted, LimiterState, Refused, refusal, rules_of
from gateway.limits.rules import MOST_OWED, LeaseRule, RateRule, Rule, present_backlog

# After so many decisions twice as many of the entries that were looked at least recently are looked at, and
# the idle ones forgotten.
SWEEP = 16


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class MemoryLimiter:
    """Decides in memory, with the arithmetic of `RedisLimiter`. For one event loop.

    Memory: an entry for each rate that has something to drain and each subject with requests in flight; past
    `max_entries` rates the one seen longest ago is forgotten. `gateways`: how many share the limits.
    """

    def __init__(self, *, max_entries: int = 200_000, clock: Callable[[], int] = monotonic_us) -> None:
        self.gateways = 1
        self._clock = clock
        self._max_entries = max_entries
        self._decisions = 0
        self._rates: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
        self._held: dict[str, int] = {}

    @property
    def state(self) -> LimiterState:
        return LimiterState(False, None, self.gateways, 0)

    async def start(self) -> None:
        """Nothing to start."""

    async def aclose(self) -> None:
        """Nothing to close."""

    def __len__(self) -> int:
        """Entries kept."""
        return len(self._rates) + len(self._held)

    async def acquire(self, charges: Sequence[Charge], tokens: int = 0) -> Granted | Refused:
        rules = rules_of(charges, tokens, self.gateways)
        admitted, values = self.take(rules)
        return Granted(self, rules, values, "") if admitted else refusal(rules, values)

    def take(self, rules: Sequence[Rule]) -> tuple[bool, list[int]]:
        """Checks every rule and charges all or none; what each stands at then."""
        now = self._clock()
        self._decisions += 1
        if self._decisions % SWEEP == 0:
            self._forget_idle(now)
        rates, held = self._rates, self._held
        values = []
        admitted = True
        for rule in rules:
            if isinstance(rule, RateRule):
                stored = rates.get(rule.key)
                if stored is None or stored[0] <= now:
                    value = 0
                else:
                    value = present_backlog(stored[0] - now, stored[1], stored[2], rule.rate)
                admitted = admitted and value + rule.increment <= rule.rate.tolerance
            else:
                value = held.get(rule.key, 0)
                admitted = admitted and value < rule.limit
            values.append(value)
        if admitted:
            for index, rule in enumerate(rules):
                if isinstance(rule, RateRule):
                    values[index] += rule.increment
                    self._write(rule.key, now, values[index], rule.rate.unit, rule.rate.tolerance)
                else:
                    values[index] += 1
                    held[rule.key] = values[index]
        return admitted, values

    def recount(self, running: Iterable[Sequence[LeaseRule]]) -> None:
        """From now on these slots are taken, granted here or elsewhere."""
        self._held = {}
        for rules in running:
            for rule in rules:
                self._held[rule.key] = self._held.get(rule.key, 0) + 1

    def drop(self, rules: Sequence[Rule], lease: str) -> None:
        """Frees the slots. They need no names here: they can't outlive the process that counts them."""
        for rule in rules:
            if isinstance(rule, LeaseRule):
                held = self._held.pop(rule.key, 0)
                if held > 1:
                    self._held[rule.key] = held - 1

    def adjust(self, rule: RateRule, delta: int) -> None:
        """Changes what was charged, by `delta` microseconds."""
        now = self._clock()
        stored = self._rates.get(rule.key)
        unit, tolerance = rule.rate.unit, rule.rate.tolerance
        if stored is not None:
            delta = math.ceil(float(delta) * float(stored[1]) / float(unit))
            unit, tolerance = stored[1], stored[2]
        backlog = (stored[0] if stored else now) - now
        if delta > 0:
            backlog = max(backlog, 0)
        self._write(rule.key, now, min(backlog + delta, MOST_OWED * tolerance), unit, tolerance)

    def _write(self, key: str, now: int, backlog: int, unit: int, tolerance: int) -> None:
        if backlog <= 0:
            self._rates.pop(key, None)
            return
        self._rates[key] = (now + backlog, unit, tolerance)
        if len(self._rates) > self._max_entries:
            self._rates.popitem(last=False)

    def _forget_idle(self, now: int) -> None:
        """A clock hand over the entries: bounded work each time, and every entry comes by."""
        rates = self._rates
        for _ in range(min(2 * SWEEP, len(rates))):
            key = next(iter(rates))
            if rates[key][0] <= now:
                del rates[key]
            else:
                rates.move_to_end(key)
