"""`strict` functions that the model may call or not: free text, until a call begins, whose arguments then
keep to the function's schema. As a grammar (Lark, as llguidance has it: `[lazy]` ends text at the first
mark)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from worker.grammar.closing import close_objects
from worker.grammar.compiling import SCHEMA_OPTIONS
from worker.text.calls import CallFormat
from worker.text.reasoning import OPEN

_ANY: Final = {"type": "object"}


def strict_grammar(
    format: CallFormat, tools: Sequence[Mapping[str, Any]], strict: frozenset[str], *, special: bool
) -> str | None:
    """None for a format in which calls can't be held to schemas: only those that are a JSON object between
    marks can.

    Args:
        format: how the model writes calls.
        tools: as the model sees them.
        strict: functions whose arguments keep to their schema; any object is good for the others.
        special: the mark before calls is a special token of the model's, not text.
    """
    mark = format.marks[0]
    if len(format.marks) > 1 or mark.payload != "object" or not (mark.start and mark.end):
        return None
    lazy, begin, end = "", mark.start, mark.end
    if not special:
        lazy, begin, end = "[lazy]", _quoted(begin), _quoted(end)
    functions = " | ".join(f"f{index}" for index in range(len(tools)))
    rules = [
        "start: FIRST | first rest",
        "rest: call* TEXT",
        # An answer that begins with reasoning isn't this grammar's: marks in reasoning mean nothing.
        f"FIRST: TEXT & ~/\\s*{OPEN}(?s:.*)/",
        "TEXT: /(?s:.*)/",
        "first: head_of_first called",
        f"head_of_first{lazy}: FIRST {begin}",
        "call: head called",
        f"head{lazy}: TEXT {begin}",
        f"called: {_quoted(chr(10) + '{')} ({functions}) {_quoted('}' + chr(10))} {end}",
    ]
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = _ANY
        if function["name"] in strict and function.get("parameters"):
            schema = copy.deepcopy(function["parameters"])
            close_objects(schema)
        begin = _quoted(f'"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f"f{index}: {begin} %json {json.dumps({**schema, 'x-guidance': SCHEMA_OPTIONS})}")
    return "\n".join(rules)


def _quoted(text: str) -> str:
    return json.dumps(text)
