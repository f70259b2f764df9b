"""Sizes, counts and durations as people write them: ``20GiB``, ``512MB``, ``8k``, ``2s``, ``1m30s``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

_BYTES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2,
    "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_COUNTS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}  # vLLM's
_SECONDS = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)", re.ASCII)


def parse_bytes(value: object) -> int:
    """A size in bytes from ``20GiB``, ``512MB``, ``4096`` or a number; ValueError says what is accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"a size such as 20GiB or 512MB is needed, not {value!r}")
    match = _NUMBER.fullmatch(str(value))
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError(f"{value!r} is no size; write a number with B, kB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def parse_count(value: object) -> object:
    """A whole number from ``8k`` (8,000), ``8K`` (8,192), ``25.6k``; what isn't text is left to others."""
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _COUNTS or not match[2]:
        return value
    count = Decimal(match[1]) * _COUNTS[match[2]]
    if count != int(count):
        raise ValueError(f"{value!r} is no whole number")
    return int(count)


def parse_duration(value: object) -> float:
    """Seconds from ``2s``, ``250ms``, ``1m30s``, ``15m`` or a number; ValueError says what is accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"a duration such as 2s or 15m is needed, not {value!r}")
    text = str(value).strip()
    match = _NUMBER.fullmatch(text)
    if match is not None and match[2].lower() in _SECONDS:
        return float(match[1]) * _SECONDS[match[2].lower()]
    parts = _DURATION_PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    raise ValueError(f"{value!r} is no duration; write a number with us, ms, s, m, h or d")


def format_bytes(size: int | float) -> str:
    """``2.4 GiB``; at most one decimal."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(seconds: float) -> str:
    """``12ms``, ``1.5s``, ``6m0s``: the way rate-limit headers write a reset."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{rest}s"


ByteSize = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(format_bytes, when_used="json")]
Count = Annotated[int, BeforeValidator(parse_count)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
