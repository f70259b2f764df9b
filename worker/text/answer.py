"""What an answer is made of: reasoning, content and calls, told apart while the text arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol


class Reasoning(NamedTuple):
    """What the model thinks before it answers."""

    text: str


class Content(NamedTuple):
    """What is said to the user."""

    text: str


class CallStart(NamedTuple):
    """A function is called; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """The next characters of the call's arguments, JSON as the model wrote it."""

    text: str


class CallEnd(NamedTuple):
    """The call's arguments are whole. Missing where the answer was cut."""


Part = Reasoning | Content | CallStart | CallArguments | CallEnd

CALL_END: Final = CallEnd()


class Reader(Protocol):
    """A machine that tells the parts of a text apart. What it gives, parts of one kind that follow each other
    joined, doesn't depend on how the text is cut into pieces."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` brings; what may still become something else is held back."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, now that nothing follows."""
        ...


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, less than all of it: what follows decides."""
    if not mark:
        return 0
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same with neighbours of one kind made one, and empty texts left out."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        match part, last:
            case (Reasoning("") | Content("") | CallArguments(""), _):
                pass
            case Reasoning(text), Reasoning(before):
                made[-1] = Reasoning(before + text)
            case Content(text), Content(before):
                made[-1] = Content(before + text)
            case CallArguments(text), CallArguments(before):
                made[-1] = CallArguments(before + text)
            case _:
                made.append(part)
    return made


class AnswerReader:
    """Reasoning first, where the model has it, and calls in what follows it.

    Args:
        most_calls: calls beyond so many are left out; None: all are given.
    """

    def __init__(self, reasoning: Reader | None, calls: Reader | None, most_calls: int | None = None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._most = most_calls
        self._started = 0
        self._whole = True  # whether the last call is

    @property
    def called(self) -> bool:
        """Whether the answer has calls, and the last of them isn't cut."""
        return self._started > 0 and self._whole

    def push(self, text: str) -> list[Part]:
        """As Reader.push, neighbours of one kind joined."""
        parts: list[Part] = [Content(text)]
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        return self._counted(self._read_calls(parts))

    def finish(self) -> list[Part]:
        parts: list[Part] = self._reasoning.finish() if self._reasoning is not None else []
        parts = self._read_calls(parts)
        if self._calls is not None:
            parts += self._calls.finish()
        return self._counted(parts)

    def _read_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        made: list[Part] = []
        for part in parts:
            made += self._calls.push(part.text) if isinstance(part, Content) else [part]
        return made

    def _counted(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, CallStart):
                self._started += 1
                self._whole = False
            call = isinstance(part, CallStart | CallArguments | CallEnd)
            if call and self._most is not None and self._started > self._most:
                self._whole = True  # of those that are given
                continue
            if isinstance(part, CallEnd):
                self._whole = True
            kept.append(part)
        return joined(kept)
