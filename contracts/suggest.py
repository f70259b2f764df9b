"""What somebody may have meant by a word that isn't known: options, settings, names of models."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CLOSE = 0.6  # difflib's ratio; click, which suggests commands and options, takes the same


def closest(word: str, known: Iterable[str], least: float = _CLOSE) -> str | None:
    """The known word that is most like it; None where none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=least)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message: ``; did you mean 'this'?``, or nothing."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean '{found}'?"
