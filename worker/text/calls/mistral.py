"""Calls as Mistral's models write them: up to tokenizer v7 `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`,
from v11 on `[TOOL_CALLS]get_weather[ARGS]{…}` for each, v11 itself with `[CALL_ID]…` before the arguments."""

from __future__ import annotations

import re
from typing import Final

from worker.text.answer import CALL_END, CallArguments, CallStart, Part
from worker.text.calls.format import CallFormat, Mark
from worker.text.calls.json_call import Balance
from worker.text.calls.payload import PayloadReader
from worker.text.calls.reading import NAME, WHITE, Functions, PayloadState

MISTRAL = CallFormat(
    name="mistral",
    marks=(Mark("[TOOL_CALLS]", "arguments"),),
    template_signs=("[TOOL_CALLS]",),
    short_ids=True,
    inner=("[ARGS]", "[CALL_ID]"),
)

_HEAD: Final = re.compile(
    rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*\w{{1,64}}\s*)?(?:\[ARGS\])?\s*(?=\{{)", re.ASCII
)
# As far as a head may have come that isn't whole.
_OPEN_HEAD: Final = re.compile(
    rf"{NAME}\s*(?:\[[A-Z_]{{0,7}}(?:\]\s*\w{{0,64}}\s*(?:\[[A-Z]{{0,4}}\]?)?)?\s*)?", re.ASCII
)


class ArgumentsReader:
    """Reads what follows `[TOOL_CALLS]` (see PayloadState): one call, or a list of them."""

    def __init__(self, mark: Mark, functions: Functions) -> None:
        self.rest = ""
        self._state = "head"
        self._list = PayloadReader(Mark(mark.start, "list", mark.end, mark.only_known), functions)
        self._text = ""
        self._balance = Balance()
        self._inner: PayloadState | None = None

    @property
    def state(self) -> str:
        return self._inner.state if self._inner is not None else self._state

    def push(self, text: str) -> list[Part]:
        if self._inner is not None:
            return self._delegate(text)
        self._text += text
        if self._state == "head" and self._text.lstrip(WHITE)[:1] == "[":
            self._inner = self._list
            return self._delegate(self._text)
        parts: list[Part] = []
        if self._state == "head":
            self._read_head(parts)
        if self._state == "arguments":
            self._read_arguments(parts)
        return parts

    def finish(self) -> list[Part]:
        if self._inner is not None:
            parts = self._inner.finish()
            self.rest = self._inner.rest
            return parts
        if self._state == "head":
            self._break()
        else:
            self._state = "over"
        return []

    def _delegate(self, text: str) -> list[Part]:
        assert self._inner is not None
        parts = self._inner.push(text)
        self.rest = self._inner.rest
        return parts

    def _read_head(self, parts: list[Part]) -> None:
        head = _HEAD.match(self._text)
        if head is not None:
            parts.append(CallStart(head["name"]))
            self._text = self._text[head.end() :]
            self._state = "arguments"
            return
        begun = self._text.lstrip(WHITE)
        if begun and _OPEN_HEAD.fullmatch(begun) is None:
            self._break()

    def _read_arguments(self, parts: list[Part]) -> None:
        end = self._balance.push(self._text)
        if end < 0:
            parts.append(CallArguments(self._text))
            self._text = ""
            return
        parts += [CallArguments(self._text[:end]), CALL_END]
        self.rest, self._text = self._text[end:], ""
        self._state = "over"

    def _break(self) -> None:
        self.rest, self._text = self._text, ""
        self._state = "broken"
