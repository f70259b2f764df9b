"""How much a body holds, counted before it is decoded.

Decoding JSON is one call, in which nothing else runs: millions of small objects would stop all other
requests for many seconds, while texts of the same size take no time. So large bodies are counted first, on a
thread and in slices between which others go on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import numpy as np

from contracts.errors import ApiError

MAX_CONTAINERS: Final = 1 << 17  # objects and lists: what 16,384 messages with parts and calls have
MAX_STRINGS: Final = 1 << 18  # names of fields included
MAX_VALUES: Final = 1 << 21  # token ids above all
_SMALL: Final = 1 << 18  # bytes that can't hold enough to matter
_SLICE: Final = 1 << 20  # bytes, some milliseconds
_QUOTE, _BACKSLASH, _COMMA, _OPEN = b'"\\,{'
_LOWER: Final = 0x20  # makes { of [


@dataclass(slots=True)
class Contents:
    """What a JSON text holds; if it is none, the numbers mean nothing. `values`: commas between them."""

    containers: int = 0
    strings: int = 0
    values: int = 0


async def check_contents(body: bytes) -> None:
    """ApiError 400 for a body with more in it than can be decoded at once."""
    if len(body) <= _SMALL:
        return
    found = await asyncio.to_thread(contents, body)
    for count, most, what in (
        (found.containers, MAX_CONTAINERS, "objects and lists"),
        (found.strings, MAX_STRINGS, "strings and names of fields"),
        (found.values, MAX_VALUES, "values"),
    ):
        if count > most:
            raise ApiError(
                400,
                f"The request body holds {count} {what}; at most {most} are read in one request. Send "
                "fewer at a time.",
                code="too_many_values",
            )


def contents(body: bytes) -> Contents:
    """Counts what is outside of strings; whether it is valid JSON is for the decoder to say."""
    data = np.frombuffer(body, np.uint8)
    found, quotes, inside, escaped = Contents(), 0, False, False
    for start in range(0, len(data), _SLICE):
        part = data[start : start + _SLICE]
        marks = part == _QUOTE
        slashes = part == _BACKSLASH
        if escaped or slashes.any():
            hidden, escaped = _escaped(slashes, escaped)
            marks &= ~hidden
        quotes += int(np.count_nonzero(marks))
        text = np.bitwise_xor.accumulate(marks)
        if inside:
            np.logical_not(text, out=text)
        inside = bool(text[-1])
        structure = ~text
        found.values += int(np.count_nonzero((part == _COMMA) & structure))
        found.containers += int(np.count_nonzero(((part | _LOWER) == _OPEN) & structure))
    found.strings = quotes // 2
    return found


def _escaped(slashes: np.ndarray, first: bool) -> tuple[np.ndarray, bool]:
    """Which bytes come after an odd number of backslashes, `first`: whether the first does; and the same of
    the byte after the last."""
    places = np.arange(len(slashes))
    # In each run of backslashes, the place before it; one that hides the first byte counts as part of a run.
    before = np.maximum.accumulate(np.where(slashes, -1 - first, places))
    odd = ((places - before) & 1).astype(bool)
    return np.concatenate(([first], odd[:-1])), bool(odd[-1])
