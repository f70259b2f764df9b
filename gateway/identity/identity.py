"""What the gateway knows about a caller."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from contracts.errors import model_not_found

MAX_USER = 512  # characters

Priority = Literal["high", "normal", "low"]
MIN_QPS, MAX_QPS = 0.001, 1e6
MAX_COUNT = 10**12
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key's own limits; None leaves a limit to the defaults."""

    qps: Annotated[float, msgspec.Meta(ge=MIN_QPS, le=MAX_QPS)] | None = None
    burst: _Count | None = None
    concurrency: _Count | None = None
    tokens_per_minute: _Count | None = None


NO_LIMITS = KeyLimits()


class Identity(msgspec.Struct, frozen=True):
    """One caller. `key_id`: None without a key; `models`: the names that may be used, None for all."""

    user: str
    key_id: str | None = None
    models: frozenset[str] | None = None
    priority: Priority = "normal"
    limits: KeyLimits = NO_LIMITS

    def may_use(self, name: str, model: str) -> bool:
        """`name`: what the request says; `model`: what that resolves to. A key for a model covers its
        aliases, a key for an alias covers only that."""
        return self.models is None or name in self.models or model in self.models

    def require(self, name: str, model: str) -> None:
        """ApiError 404 `model_not_found` for a model that isn't this caller's, in the very words of a model
        that doesn't exist: a key doesn't tell what else is served."""
        if self.models is not None and not self.may_use(name, model):
            raise model_not_found(name)
