"""Limits as people set them: field by field, each layer over the one before it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.limits.limiter import LONGEST_BURST_S, MOST_TOKENS, Limit

FIELDS = ("qps", "burst", "concurrency", "tokens_per_minute")
NONE = "none"  # how people write "no such limit"

T = TypeVar("T")


class Bounds(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one layer says. UNSET: nothing, so the layer below holds; None: there is no such limit."""

    qps: float | UnsetType | None = UNSET
    burst: int | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return any(value is not UNSET for value in msgspec.structs.astuple(self))

    def over(self, below: Bounds) -> Bounds:
        """This layer's fields, and the lower one's where it has none. A burst belongs to its rate: the lower
        one's goes with its qps."""
        merged: dict[str, Any] = {name: _first(getattr(self, name), getattr(below, name)) for name in FIELDS}
        if self.qps is not UNSET:
            merged["burst"] = self.burst
        return Bounds(**merged)

    def without(self, above: Bounds) -> Bounds:
        """The fields that `above` doesn't set. Whoever sets qps or burst sets both."""
        left: dict[str, Any] = {
            name: UNSET if getattr(above, name) is not UNSET else getattr(self, name) for name in FIELDS
        }
        if above.qps is not UNSET or above.burst is not UNSET:
            left["qps"] = left["burst"] = UNSET
        return Bounds(**left)

    def limit(self) -> Limit:
        """What holds. A burst without qps bounds nothing; what is more than can be counted is cut to that."""
        qps, burst = _bound(self.qps), _bound(self.burst)
        tokens = _bound(self.tokens_per_minute)
        if qps is None:
            burst = None
        elif burst is not None:
            burst = max(1, min(burst, int(qps * LONGEST_BURST_S)))
        if tokens is not None:
            tokens = min(tokens, MOST_TOKENS)
        return Limit(qps, burst, _bound(self.concurrency), tokens)

    def check(self) -> None:
        """ValueError naming the field, the bound and the way out, for a layer that stands alone."""
        qps, burst, tokens = _bound(self.qps), _bound(self.burst), _bound(self.tokens_per_minute)
        Limit(qps, burst, _bound(self.concurrency), tokens)

    def __str__(self) -> str:
        said = [(name, value) for name in FIELDS if (value := getattr(self, name)) is not UNSET]
        return (
            ", ".join(f"{name} {NONE if value is None else f'{value:.12g}'}" for name, value in said) or "-"
        )


NOTHING = Bounds()


def _first(above: object, below: object) -> object:
    return below if above is UNSET else above


def _bound(value: T | UnsetType | None) -> T | None:
    return None if isinstance(value, UnsetType) else value


def bounds_of(settings: object) -> Bounds:
    """From an object with the four fields, None saying nothing: a block of the fleet file, a key's limits."""
    said = {name: value for name in FIELDS if (value := getattr(settings, name)) is not None}
    return Bounds(**said)
