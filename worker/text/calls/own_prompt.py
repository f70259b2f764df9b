"""Tools for models whose chat template has no place for them: told of in Hermes' format, in messages that any
template can render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_RESULT: Final = "<tool_response>\n{}\n</tool_response>"
_PROMPT: Final = """# Tools

You may call functions to help with what is asked. These are there, as JSON between <tools> and </tools>:
<tools>
{}
</tools>

To call one, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation with the tools in its system message, and with calls and results as text."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            _add_result(told, _RESULT.format(_text(message)))
        elif message.get("tool_calls"):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            told.append({**plain, "content": "\n".join(filter(None, [_text(message), *calls]))})
        else:
            told.append(dict(message))
    prompt = _PROMPT.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told and told[0].get("role") in ("system", "developer"):
        told[0]["content"] = f"{_text(told[0])}\n\n{prompt}"
        return told
    return [{"role": "system", "content": prompt}, *told]


def _add_result(told: list[dict[str, Any]], result: str) -> None:
    """Results are the user's, those of one turn one message: many templates want turns to alternate."""
    if told and told[-1].get("result"):
        told[-1]["content"] += "\n" + result
    else:
        told.append({"role": "user", "content": result, "result": True})


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
