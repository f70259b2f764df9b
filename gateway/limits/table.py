"""Which limits a request must pass: those of its user, its key and its model, from all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec import UNSET

from gateway.identity.identity import NO_LIMITS, Identity, KeyLimits
from gateway.limits.bounds import NOTHING, Bounds, bounds_of
from gateway.limits.limiter import Charge, Limit
from gateway.limits.overrides import DEFAULT, Entry, Overrides, subject

MAX_PLANS = 8192


class BoundSettings(Protocol):
    """A block of limits in the fleet file; None: it says nothing."""

    @property
    def qps(self) -> float | None: ...
    @property
    def burst(self) -> int | None: ...
    @property
    def concurrency(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...


class Plan:
    """What one caller's requests for one model are charged to. `counts_tokens`: some limit is of tokens."""

    __slots__ = ("charges", "counts_tokens", "key_limits")

    def __init__(self, charges: tuple[Charge, ...], key_limits: KeyLimits) -> None:
        self.charges = charges
        self.counts_tokens = any(charge.limit.tokens is not None for charge in charges)
        self.key_limits = key_limits


class LimitTable:
    """Limits of the fleet file (`default`, `models`), below those that were set since (`apply`).

    The default is every user's. What is set for a user holds for all the user's keys together. What a key has
    of its own takes the place of the default for its requests, and comes in addition to what is set for its
    user. A model's limits are for all its users together.
    """

    def __init__(self, default: BoundSettings, models: Mapping[str, BoundSettings | None]) -> None:
        self._overrides: Overrides = {}
        self.configure(default, models)

    def configure(self, default: BoundSettings, models: Mapping[str, BoundSettings | None]) -> None:
        """From now on this is what the fleet file says."""
        self._default = bounds_of(default)
        self._models = {name: bounds_of(settings) for name, settings in models.items() if settings}
        self._plans: dict[tuple[str, str | None, str], Plan] = {}

    def apply(self, overrides: Overrides) -> None:
        """From now on these are what was set."""
        self._overrides = overrides
        self._plans = {}

    def plan(self, who: Identity, model: str) -> Plan:
        """Costs a look-up, after a caller's first request."""
        key = (who.user, who.key_id, model)
        plan = self._plans.get(key)
        if plan is None or plan.key_limits is not who.limits:
            plan = self._make(who, model)
            if len(self._plans) >= MAX_PLANS:
                self._plans = {}
            self._plans[key] = plan
        return plan

    # --- what holds, also for people who ask

    def default(self) -> Bounds:
        return self._set(DEFAULT).over(self._default)

    def of_user(self, user: str) -> Bounds:
        """Without what the user's keys change about it."""
        return self._set(subject("user", user)).over(self.default())

    def of_key(self, key_id: str, own: KeyLimits = NO_LIMITS) -> Bounds:
        """The key's own. A burst without qps is for the default's rate."""
        bounds = self._set(subject("key", key_id)).over(bounds_of(own))
        if bounds.burst is not UNSET and bounds.qps is UNSET:
            return msgspec.structs.replace(bounds, qps=self.default().qps)
        return bounds

    def of_model(self, model: str) -> Bounds:
        return self._set(subject("model", model)).over(self._models.get(model, NOTHING))

    def _set(self, name: str) -> Bounds:
        entry: Entry | None = self._overrides.get(name)
        return NOTHING if entry is None else entry.bounds

    def _make(self, who: Identity, model: str) -> Plan:
        key = NOTHING if who.key_id is None else self.of_key(who.key_id, who.limits)
        user = self._set(subject("user", who.user)).over(self.default().without(key))
        charges = []
        if limit := _limit(user):
            charges.append(Charge.of_user(who.user, limit))
        if who.key_id is not None and (limit := _limit(key)):
            charges.append(Charge.of_key(who.key_id, who.user, limit))
        if limit := _limit(self.of_model(model)):
            charges.append(Charge.of_model(model, limit))
        return Plan(tuple(charges), who.limits)


def _limit(bounds: Bounds) -> Limit | None:
    """None when nothing is bounded."""
    limit = bounds.limit()
    return limit if limit.bounds_anything else None
