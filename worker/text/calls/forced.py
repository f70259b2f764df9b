"""Calls that a grammar made the whole answer of: `tool_choice` "required", or a certain function."""

from __future__ import annotations

from typing import Final

from worker.text.answer import CALL_END, CallArguments, CallStart, Content, Part
from worker.text.calls.format import CallFormat, Mark
from worker.text.calls.json_call import Balance

_WHITE: Final = " \t\r\n"

# A JSON list of calls, as `tool_choice: "required"` makes of any model's answer.
LIST_OF_CALLS = CallFormat(name="required", marks=(Mark("", "list"),), template_signs=())


class NamedCall:
    """A Reader (worker/text/answer.py): the answer is the arguments of a call to `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._balance = Balance()
        self._state = "before"

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._state == "before":
            text = text.lstrip(_WHITE)
            if not text:
                return []
            self._state = "arguments" if text[0] == "{" else "content"
            if self._state == "arguments":
                parts.append(CallStart(self._name))
        if self._state == "arguments":
            end = self._balance.push(text)
            parts.append(CallArguments(text if end < 0 else text[:end]))
            if end >= 0:
                parts.append(CALL_END)
                text = text[end:]
                self._state = "after"
        if self._state == "after":
            text = text.lstrip(_WHITE)
            self._state = "content" if text else "after"
        if self._state == "content":
            parts.append(Content(text))
        return parts

    def finish(self) -> list[Part]:
        return []
