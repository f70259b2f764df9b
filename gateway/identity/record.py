"""A key as it is kept: everything but its secret, and what it may hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.identity.errors import KeyRefused
from gateway.identity.identity import MAX_USER, NO_LIMITS, KeyLimits, Priority

MAX_NAME = 128  # characters, of a key's name and of a model's
MAX_MODELS = 256
MAX_LIFE = 100 * 365.25 * 86400  # seconds

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")

KeyState = Literal["active", "expired", "revoked"]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. `models`: None for all; times are Unix seconds."""

    id: str
    user: str
    name: str = ""
    models: tuple[str, ...] | None = None
    priority: Priority = "normal"
    limits: KeyLimits = NO_LIMITS
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None
    rotated_from: str | None = None

    def state(self, now: float) -> KeyState:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


def checked_text(field: str, value: str, longest: int, least: int = 0) -> str:
    """`value` without space around it; KeyRefused names the field."""
    value = value.strip()
    if not least <= len(value) <= longest or not value.isprintable():
        raise KeyRefused(f"{field} must have {least} to {longest} printable characters")
    return value


def checked_user(user: str) -> str:
    return checked_text("user", user, MAX_USER, least=1)


def checked_models(models: Iterable[str] | None) -> tuple[str, ...] | None:
    if models is None:
        return None
    names = tuple(dict.fromkeys(models))
    if not 1 <= len(names) <= MAX_MODELS:
        raise KeyRefused(f"a key is for all models or for 1 to {MAX_MODELS} of them")
    for name in names:
        if len(name) > MAX_NAME or not _MODEL.fullmatch(name):
            raise KeyRefused(f"{name[:MAX_NAME]!r} can't be the name of a model")
    return names


def checked_limits(limits: KeyLimits) -> KeyLimits:
    try:
        return msgspec.convert(msgspec.to_builtins(limits), KeyLimits)
    except msgspec.ValidationError as error:
        raise KeyRefused(f"limits: {error}") from None


def checked_expiry(expires: float | None, now: float) -> float | None:
    """A Unix time; KeyRefused unless it is in the future, and within `MAX_LIFE`."""
    if expires is not None and not (math.isfinite(expires) and now < expires <= now + MAX_LIFE):
        raise KeyRefused("a key must expire in the future, and within 100 years")
    return expires


def checked_grace(grace: float) -> float:
    if not 0 <= grace <= MAX_LIFE:
        raise KeyRefused("grace must be from 0 s to 100 years")
    return grace
