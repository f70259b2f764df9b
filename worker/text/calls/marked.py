"""Text with calls between marks, as models write it who were taught a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from worker.text.answer import Content, Part, held_back
from worker.text.calls.format import CallFormat, Mark
from worker.text.calls.mistral import ArgumentsReader
from worker.text.calls.payload import PayloadReader
from worker.text.calls.pythonic import PythonReader
from worker.text.calls.qwen3_coder import ParametersReader
from worker.text.calls.reading import Functions, PayloadState

_WHITE: Final = " \t\r\n"
_FIRST: Final = {"object": "{", "list": "[", "sequence": "{", "python": "["}  # where no mark is before them
_READERS: Final[Mapping[str, Callable[[Mark, Functions], PayloadState]]] = {
    "object": PayloadReader,
    "list": PayloadReader,
    "sequence": PayloadReader,
    "parameters": ParametersReader,
    "arguments": ArgumentsReader,
    "python": PythonReader,
}


class MarkedCalls:
    """A Reader (worker/text/answer.py) of a format's calls.

    White space before a call, and after the last one, belongs to its marks. What looked like a call and
    turned out to be none is content, as it came.

    Args:
        names: the functions that are offered, with the schemas of their parameters where those are known.
    """

    def __init__(self, format: CallFormat, names: Functions) -> None:
        self._marks = [mark for mark in format.marks if mark.start]
        self._unmarked = {_FIRST[mark.payload]: mark for mark in format.marks if not mark.start}
        self._names = names
        self._text = ""  # not looked at, or held because a mark may begin there
        self._lead = ""  # white space and mark before the payload, until a call is made of it
        self._payload: PayloadState | None = None
        self._begun = False  # something else than white space has come
        self._called = False  # the last of that was a call

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._payload is None:
            self._text += text
        else:
            self._take(self._payload, self._payload.push(text), parts)
        self._read_text(parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._payload is not None:
            self._take(self._payload, self._payload.finish(), parts)
            self._read_text(parts)
        if not self._called or self._text.strip(_WHITE):
            parts.append(Content(self._text))
        self._text = ""
        return parts

    def _read_text(self, parts: list[Part]) -> None:
        """Content up to the next mark, and what follows that, as far as there is text."""
        while self._payload is None and self._text:
            place, mark = self._next_mark()
            if mark is None:
                self._say(parts, self._plain_length())
                return
            after = place + len(mark.start)
            rest = self._text[after:]
            self._text = self._text[:after]
            self._say(parts, len(self._text[:place].rstrip(_WHITE)))
            self._lead, self._text = self._text, ""
            self._begun = True
            self._payload = _READERS[mark.payload](mark, self._names)
            self._take(self._payload, self._payload.push(rest), parts)

    def _say(self, parts: list[Part], length: int) -> None:
        if length:
            parts.append(Content(self._text[:length]))
            self._text = self._text[length:]
            self._begun = True
            self._called = False

    def _next_mark(self) -> tuple[int, Mark | None]:
        """Where the first mark is; those without a text of their own only at the beginning of the answer."""
        if not self._begun:
            text = self._text.lstrip(_WHITE)
            mark = self._unmarked.get(text[:1])
            if mark is not None:
                return len(self._text) - len(text), mark
        found = [(place, mark) for mark in self._marks if (place := self._text.find(mark.start)) >= 0]
        return min(found, key=lambda item: item[0], default=(-1, None))

    def _plain_length(self) -> int:
        """How much of the text is content whatever follows."""
        held = max((held_back(self._text, mark.start) for mark in self._marks), default=0)
        return len(self._text[: len(self._text) - held].rstrip(_WHITE))

    def _take(self, payload: PayloadState, made: list[Part], parts: list[Part]) -> None:
        parts += made
        if made:
            self._lead = ""
            self._called = True
        if payload.state == "broken" and self._lead:
            parts.append(Content(self._lead))
            self._called = False
        if payload.state in ("over", "broken"):
            self._payload = None
            self._lead = ""
            self._text = payload.rest
