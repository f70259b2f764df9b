"""Calls as Llama 4, Llama 3.2 and others write them who were taught to: a Python list,
`[get_weather(city="Köln", days=2), now()]` (Llama 4's model card, "Zero-shot function calling")."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final, Literal

from worker.text.answer import CALL_END, CallArguments, CallStart, Part
from worker.text.calls.format import CallFormat, Mark
from worker.text.calls.reading import NAME, WHITE, Functions, StepReader

LLAMA4_PYTHONIC = CallFormat(
    name="llama4_pythonic",
    marks=(Mark("<|python_start|>", "python", "<|python_end|>"), Mark("", "python", only_known=True)),
    template_signs=("func_name1(params_name1=params_value1",),
)
PYTHONIC = CallFormat(name="pythonic", marks=(Mark("", "python", only_known=True),), template_signs=())

_CALL: Final = re.compile(rf"(?P<before>\s*)(?P<name>{NAME})\s*\(", re.ASCII)
_OPEN_CALL: Final = re.compile(rf"{NAME}\s*", re.ASCII)
_KEY: Final = re.compile(r"\s*(?P<key>\w{1,128})\s*=")
_OPEN_KEY: Final = re.compile(r"\w{1,128}\s*")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_TELLING: Final = re.compile(r"[\"'()\[\]{},\\]")


class ValueEnd:
    """Finds where an argument of a Python call ends, whatever may be wrong inside it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._scanned = 0

    def find(self, text: str) -> int:
        """Where `,` or `)` ends the value that `text` begins with, which grows from one time to the next; -1
        when it isn't there yet."""
        while self._scanned < len(text):
            if self._escaped:
                self._escaped = False
                self._scanned += 1
                continue
            found = _TELLING.search(text, self._scanned)
            if found is None:
                self._scanned = len(text)
                return -1
            mark = found[0]
            if not self._quote and self._depth == 0 and mark in ",)":
                return found.start()
            self._scanned = found.end()
            self._take(mark)
        return -1

    def _take(self, mark: str) -> None:
        if self._quote:
            self._escaped = mark == "\\"
            self._quote = "" if mark == self._quote else self._quote
        elif mark in "\"'":
            self._quote = mark
        elif mark in "([{":
            self._depth += 1
        elif mark in ")]}":
            self._depth -= 1


class PythonReader(StepReader):
    """Reads a list of calls (see PayloadState); each argument is passed on when it is whole."""

    def __init__(self, mark: Mark, functions: Functions) -> None:
        super().__init__(mark)
        self.state: Literal["open", "call", "key", "value", "between", "close", "over", "broken"] = "open"
        self._names = functions if mark.only_known else None
        self._before = ""  # text before the call that is being read, no call's part
        self._count = 0  # arguments of this call
        self._end = ValueEnd()

    def finish(self) -> list[Part]:
        if self.state in ("open", "call"):
            self._break()
        elif self.state in ("between", "close"):
            self.rest, self._text = self._text, ""
        if self.state != "broken":
            self.state = "over"
        return []

    def _step(self, parts: list[Part]) -> bool:
        match self.state:
            case "open":
                return self._open()
            case "call":
                return self._read_name(parts)
            case "key":
                return self._read_key(parts)
            case "value":
                return self._read_value(parts)
            case "between":
                return self._between()
            case _:
                return self._close()

    def _open(self) -> bool:
        begun = self._text.lstrip(WHITE)
        if begun[:1] == "[":
            self._before = self._text[: len(self._text) - len(begun) + 1]
            self._text = begun[1:]
            self.state = "call"
            return True
        if begun:
            self._break()
        return False

    def _read_name(self, parts: list[Part]) -> bool:
        call = _CALL.match(self._text)
        if call is not None and (self._names is None or call["name"] in self._names):
            self._text = self._text[call.end() :]
            parts += [CallStart(call["name"]), CallArguments("{")]
            self._before = ""
            self._count = 0
            self.state = "key"
            return True
        begun = self._text.lstrip(WHITE)
        if call is not None or (begun and _OPEN_CALL.fullmatch(begun) is None):
            self._break()
        return False

    def _read_key(self, parts: list[Part]) -> bool:
        key = _KEY.match(self._text)
        begun = self._text.lstrip(WHITE)
        if key is not None:
            self._text = self._text[key.end() :]
            parts.append(
                CallArguments(f"{', ' if self._count else ''}{json.dumps(key['key'], ensure_ascii=False)}: ")
            )
            self._count += 1
            self._end = ValueEnd()
            self.state = "value"
            return True
        if begun and _OPEN_KEY.fullmatch(begun) is None:
            # The end of the call; or what no call has in it, and ends it all the same.
            self._text = begun[1:] if begun[0] == ")" else begun
            parts += [CallArguments("}"), CALL_END]
            self.state = "between"
            return True
        return False

    def _read_value(self, parts: list[Part]) -> bool:
        end = self._end.find(self._text)
        if end < 0:
            return False
        parts.append(CallArguments(_as_json(self._text[:end].strip())))
        self._text = self._text[end + (self._text[end] == ",") :]
        self.state = "key"
        return True

    def _between(self) -> bool:
        begun = self._text.lstrip(WHITE)
        if not begun:
            return False
        if begun[0] == ",":
            self._before, self._text = ",", begun[1:]
            self.state = "call"
        else:
            self._text = begun.removeprefix("]")
            self.state = "close"
        return True

    def _break(self) -> None:
        self.rest, self._text = self._before + self._text, ""
        self.state = "broken"


def _as_json(text: str) -> str:
    """A value as Python or JSON writes it; anything else is text."""
    value: Any = text
    try:
        value = _CONSTANTS[text] if text in _CONSTANTS else ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
