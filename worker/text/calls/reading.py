"""What readers of the text between a format's marks have in common."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

from worker.text.answer import Part
from worker.text.calls.format import Mark

WHITE: Final = " \t\r\n"
NAME: Final = r"[\w.:/-]{1,128}"

# Functions that are offered, by name; their parameters (JSON schemas) where what is written is read by them.
Functions = Collection[str] | Mapping[str, Mapping[str, Any]]


class PayloadState(Protocol):
    """A machine that reads what follows a mark.

    Once `state` is "over", `rest` is the text after the payload. Once it is "broken", `rest` is the text that
    no call was made of.
    """

    rest: str

    @property
    def state(self) -> str: ...

    def push(self, text: str) -> list[Part]:
        """The calls' parts that `text` brings."""
        ...

    def finish(self) -> list[Part]:
        """The parts that were held; the payload is over or broken then."""
        ...


class StepReader:
    """A PayloadState that goes by steps: each takes what it can from the front of `_text` and says whether it
    came further. Formats have steps of their own; `_close` is the last one of each."""

    state: str

    def __init__(self, mark: Mark) -> None:
        self.rest = ""
        self._mark = mark
        self._text = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._text += text
        while self.state not in ("over", "broken") and self._step(parts):
            pass
        return parts

    def _step(self, parts: list[Part]) -> bool:
        raise NotImplementedError

    def _close(self) -> bool:
        rest = after_end(self._text, self._mark)
        if rest is not None:
            self.rest, self._text = rest, ""
            self.state = "over"
        return False


def after_end(text: str, mark: Mark) -> str | None:
    """`text` past white space and the mark that ends a payload, where that is; None: it may still come."""
    if not mark.end:
        return text
    stripped = text.lstrip(WHITE)
    if stripped.startswith(mark.end):
        return stripped[len(mark.end) :]
    return None if mark.end.startswith(stripped) else text


def escaped(text: str) -> str:
    """Characters of a JSON string, without its quotes: pieces of a text give the pieces of its string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def kinds_of(schema: Any) -> set[str]:
    """JSON types that a schema says a value may have; none where it doesn't say."""
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    said = schema.get("type")
    found.update([said] if isinstance(said, str) else said if isinstance(said, list) else ())
    for several in ("anyOf", "oneOf"):
        for one in schema.get(several) or () if isinstance(schema.get(several), list) else ():
            found |= kinds_of(one)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    return found


def parameter(functions: Functions, function: str, name: str) -> Any:
    """The schema of a function's parameter; None where it isn't known."""
    schema = functions.get(function) if isinstance(functions, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None
