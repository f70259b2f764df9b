"""Calls as Qwen3-Coder writes them, each parameter as text between marks of its own (its chat template):

<tool_call>
<function=get_weather>
<parameter=city>
Köln
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final, Literal

from worker.text.answer import CALL_END, CallArguments, CallStart, Part, held_back
from worker.text.calls.format import CallFormat, Mark
from worker.text.calls.reading import NAME, WHITE, Functions, StepReader, escaped, kinds_of, parameter

QWEN3_CODER = CallFormat(
    name="qwen3_coder",
    # The model leaves the outer mark out at times.
    marks=(
        Mark("<tool_call>", "parameters", "</tool_call>"),
        Mark("<function=", "parameters", "</tool_call>"),
    ),
    template_signs=("<function=",),
)

_HEAD: Final = re.compile(rf"\s*<function=(?P<name>{NAME})>", re.ASCII)
_PARAMETER: Final = re.compile(r"\s*<parameter=(?P<name>[^>\n]{1,128})>")
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
# What ends a value: its mark, and what follows where a model forgets that.
_VALUE_ENDS: Final = ("</parameter>", "\n<parameter=", "\n</function>")
_HELD: Final = ("\n</parameter>", *_VALUE_ENDS)


class ParametersReader(StepReader):
    """Reads one call (see PayloadState). Arguments are JSON by the types that the function's schema has for
    them: text is passed on as it comes, anything else when it is whole."""

    def __init__(self, mark: Mark, functions: Functions) -> None:
        super().__init__(mark)
        self.state: Literal["head", "between", "value", "close", "over", "broken"] = "head"
        self._functions = functions
        self._before = "<function=" if mark.start == "<function=" else ""  # of the mark, read again
        self._text = self._before
        self._function = ""
        self._count = 0  # parameters begun
        self._schema: Any = None
        self._is_text = False
        self._begun = False  # the value's first line break is past

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self.state == "head":
            self._break()
        elif self.state == "value" and self._is_text:
            parts.append(CallArguments(escaped(self._value(self._text, True))))
        elif self.state == "close":
            self.rest = self._text
        if self.state != "broken":
            self.state = "over"
        return parts

    def _step(self, parts: list[Part]) -> bool:
        match self.state:
            case "head":
                return self._read_head(parts)
            case "between":
                return self._between(parts)
            case "value":
                return self._read_value(parts)
            case _:
                return self._close()

    def _read_head(self, parts: list[Part]) -> bool:
        head = _HEAD.match(self._text)
        if head is not None:
            self._function = head["name"]
            self._text = self._text[head.end() :]
            parts += [CallStart(self._function), CallArguments("{")]
            self.state = "between"
            return True
        begun = self._text.lstrip(WHITE)
        name = begun.removeprefix(_FUNCTION)
        possible = _FUNCTION.startswith(begun)
        if begun.startswith(_FUNCTION):
            possible = name == "" or re.fullmatch(NAME, name, re.ASCII) is not None
        if not possible:
            self._break()
        return False

    def _between(self, parts: list[Part]) -> bool:
        begun = _PARAMETER.match(self._text)
        if begun is not None:
            name = begun["name"].strip()
            self._text = self._text[begun.end() :]
            self._schema = parameter(self._functions, self._function, name)
            kinds = kinds_of(self._schema)
            self._is_text = kinds <= {"string"}
            comma = ", " if self._count else ""
            parts.append(
                CallArguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: " + '"' * self._is_text)
            )
            self._count += 1
            self._begun = False
            self.state = "value"
            return True
        text = self._text.lstrip(WHITE)
        if text.startswith(_FUNCTION_END):
            self._text = text[len(_FUNCTION_END) :]
        elif _FUNCTION_END.startswith(text) or "<parameter=".startswith(text) or _is_open(text):
            return False
        # Whatever else comes here, the call has ended.
        parts += [CallArguments("}"), CALL_END]
        self.state = "close"
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        """A line break after the mark that begins a value, and one before that which ends it, aren't its."""
        found = [(place, end) for end in _VALUE_ENDS if (place := self._text.find(end)) >= 0]
        if not found:
            self._pass_on(parts)
            return False
        place, end = min(found)
        value = self._value(self._text[:place], end == _VALUE_ENDS[0])
        if self._is_text:
            parts.append(CallArguments(escaped(value) + '"'))
        else:
            parts.append(CallArguments(_as_json(value, kinds_of(self._schema))))
        self._text = self._text[place + len(end) :] if end == _VALUE_ENDS[0] else self._text[place:]
        self.state = "between"
        return True

    def _pass_on(self, parts: list[Part]) -> None:
        keep = len(self._text) - max(held_back(self._text, end) for end in _HELD)
        if self._is_text and keep:
            parts.append(CallArguments(escaped(self._value(self._text[:keep], False))))
            self._text = self._text[keep:]
            self._begun = True

    def _value(self, text: str, whole: bool) -> str:
        if not self._begun:
            text = text.removeprefix("\n")
        return text.removesuffix("\n") if whole else text

    def _break(self) -> None:
        self.rest, self._text = self._text[len(self._before) :], ""
        self.state = "broken"


def _is_open(text: str) -> bool:
    """Whether it is the beginning of a parameter's mark, without its end."""
    return text.startswith("<parameter=") and len(text) < 150 and not {">", "\n"} & set(text)


def _as_json(text: str, kinds: set[str]) -> str:
    """A value of other types than text: JSON as it is, or as Python writes it; else it is text after all."""
    text = text.strip()
    if "string" in kinds and text != "null":
        return json.dumps(text, ensure_ascii=False)
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    if text.lower() in ("true", "false"):
        return text.lower()
    return json.dumps(text, ensure_ascii=False)
