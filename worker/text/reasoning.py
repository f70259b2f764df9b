"""Reasoning before the answer, `<think>…</think>`, as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from worker.text.answer import Content, Part, Reasoning, held_back

OPEN: Final = "<think>"
CLOSE: Final = "</think>"

# Whether the answer may begin with reasoning, is in it from its first character, or has none (any more).
ThinkState = Literal["undecided", "inside", "after"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A way to write reasoning.

    Args:
        name: vLLM's name of the parser for it.
        first: what an answer begins with where the prompt doesn't show it.
    """

    name: str
    first: ThinkState

    def first_state(self, prompt: str) -> ThinkState:
        """What the answer to `prompt` begins with: many templates open the reasoning in it, or close it."""
        end = prompt[-64:].rstrip()
        if end.endswith(OPEN):
            return "inside"
        return "after" if end.endswith(CLOSE) else self.first


QWEN3: Final = ReasoningFormat("qwen3", "undecided")
DEEPSEEK_R1: Final = ReasoningFormat("deepseek_r1", "inside")
REASONING_FORMATS: Final = {format.name: format for format in (QWEN3, DEEPSEEK_R1)}


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The format of the models that a chat template is for; None: they don't reason in marks."""
    if CLOSE not in template:
        return None
    return DEEPSEEK_R1 if "<｜Assistant｜>" in template else QWEN3


class ThinkReader:
    """A Reader (worker/text/answer.py) of reasoning. Line breaks next to the marks belong to them."""

    def __init__(self, state: ThinkState) -> None:
        self.state = state
        self._text = ""
        self._opening = True  # the mark that opens it may follow, also where the prompt has one
        self._strip = state == "inside"  # line breaks at the beginning of the next text

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._text += text
        if self.state == "undecided":
            self._decide()
        if self.state == "inside":
            self._read_inside(parts)
        if self.state == "after" and self._lead_stripped():
            parts.append(Content(self._text))
            self._text = ""
        return parts

    def finish(self) -> list[Part]:
        text, self._text = self._text, ""
        return [Reasoning(text) if self.state == "inside" else Content(text)]

    def _decide(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPEN):
            self._text = begun
            self.state = "inside"
        elif not OPEN.startswith(begun):
            self.state = "after"

    def _lead_stripped(self) -> bool:
        """Whether there is text beyond the line breaks that belong to a mark."""
        if self._strip:
            self._text = self._text.lstrip("\n")
            self._strip = not self._text
        return bool(self._text)

    def _opened(self) -> bool:
        """Whether there is text beyond the mark that opens the reasoning, if there is one."""
        if self._opening and self._text.startswith(OPEN):
            self._text = self._text[len(OPEN) :]
            self._opening, self._strip = False, True
            return self._lead_stripped()
        self._opening = self._opening and OPEN.startswith(self._text)
        return not self._opening

    def _read_inside(self, parts: list[Part]) -> None:
        if not self._lead_stripped() or not self._opened():
            return
        place = self._text.find(CLOSE)
        if place < 0:
            keep = len(self._text) - held_back(self._text, CLOSE)
            keep = len(self._text[:keep].rstrip("\n"))
            parts.append(Reasoning(self._text[:keep]))
            self._text = self._text[keep:]
            return
        parts.append(Reasoning(self._text[:place].rstrip("\n")))
        self._text = self._text[place + len(CLOSE) :]
        self._strip = True
        self.state = "after"


class ReasoningTokens:
    """Counts the tokens of an answer up to the end of its reasoning, marks included.

    Args:
        open, close: the marks' tokens; None where they are several: the text shows then where they are, which
            may be some tokens later.
    """

    def __init__(self, state: ThinkState, open: int | None, close: int | None) -> None:
        self.count = 0
        self._state = state
        self._open = open
        self._close = close
        self._pending = 0

    def push(self, tokens: Sequence[int], text_state: ThinkState) -> None:
        """`text_state`: of the ThinkReader that has the text of `tokens`, as far as it shows."""
        if self._state == "undecided":
            self._pending += len(tokens)
            if self._open in tokens or text_state == "inside":
                self._state = "inside"
                self.count = self._pending - len(tokens)
            elif text_state == "after":
                self._state = "after"
        if self._state != "inside":
            return
        if self._close is None:
            self.count += len(tokens)
            self._state = text_state
        elif self._close in tokens:
            self.count += tokens.index(self._close) + 1
            self._state = "after"
        else:
            self.count += len(tokens)
