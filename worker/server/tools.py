"""What a request says of tools: checked, and as the form that a forced call must have."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from contracts.errors import bad_request
from worker.params import ParamError, StructuredOutputs
from worker.server.schemas import MAX_TOOLS, MAX_TOOLS_SIZE, Tool, decode
from worker.text.answer import Reader
from worker.text.calls import CallFormat, MarkedCalls
from worker.text.calls.forced import LIST_OF_CALLS, NamedCall

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_DEFINITIONS: Final = ("$defs", "definitions")
_CHOICES: Final = "tool_choice must be 'auto', 'none', 'required', or a function of tools by its name"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request offers, and how they may be called.

    Args:
        tools: as the client wrote them, for the chat template.
        names: of their functions.
        required: the answer is at least one call.
        named: the answer is a call of this function.
        most: calls that an answer may have; None: any number.
    """

    tools: Sequence[dict[str, Any]]
    names: Sequence[str]
    required: bool = False
    named: str | None = None
    most: int | None = None

    @property
    def forced(self) -> bool:
        return self.required or self.named is not None

    def form(self) -> StructuredOutputs:
        """What a forced answer must look like. ApiError 400 for schemas that are too long together."""
        schema = self._parameters(self.named) if self.named is not None else self._list_of_calls()
        try:
            return StructuredOutputs(json=json.dumps(schema))
        except ParamError as error:
            raise bad_request(f"The parameters of tools, as a schema: {error}", "tools") from error

    def reader(self, format: CallFormat | None) -> Reader | None:
        """A reader of one answer's calls; None where nobody knows how the model writes them."""
        if self.named is not None:
            return NamedCall(self.named)
        if self.required:
            return MarkedCalls(LIST_OF_CALLS, self.names)
        return MarkedCalls(format, self.names) if format is not None else None

    def _parameters(self, name: str) -> dict[str, Any]:
        function = next(tool["function"] for tool in self.tools if tool["function"]["name"] == name)
        return function.get("parameters") or {
            "type": "object", "properties": {}, "additionalProperties": False,
        }  # fmt: skip

    def _list_of_calls(self) -> dict[str, Any]:
        """Definitions move to the top, where references within the parameters look for them."""
        schema: dict[str, Any] = {"type": "array", "minItems": 1}
        if self.most is not None:
            schema["maxItems"] = self.most
        kinds = []
        for name in self.names:
            parameters = dict(self._parameters(name))
            for key in _DEFINITIONS:
                for title, definition in (parameters.pop(key, None) or {}).items():
                    if schema.setdefault(key, {}).setdefault(title, definition) != definition:
                        raise bad_request(f"tools define {key}.{title} in different ways", "tools")
            kinds.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        return {**schema, "items": {"anyOf": kinds} if len(kinds) > 1 else kinds[0]}


def tool_use(
    tools: msgspec.Raw, tool_choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """The tools of a request; None where it has none, or they may not be used. ApiError 400 names what is
    wrong with them."""
    offered = _offered(tools)
    if not offered:
        if tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    names = [tool["function"]["name"] for tool in offered]
    if tool_choice == "none":
        return None
    most = 1 if parallel is False else None
    if tool_choice in (None, "auto"):
        return ToolUse(offered, names, most=most)
    if tool_choice == "required":
        return ToolUse(offered, names, required=True, most=most)
    return ToolUse(offered, names, named=_named(tool_choice, names), most=most)


def _named(tool_choice: str | dict[str, Any] | None, names: Sequence[str]) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(tool_choice, dict) or tool_choice.get("type") != "function" or name is None:
        raise bad_request(f"{_CHOICES}: {{'type': 'function', 'function': {{'name': …}}}}", "tool_choice")
    if name not in names:
        raise bad_request(f"tool_choice names {str(name)[:64]!r}, which tools don't have", "tool_choice")
    return str(name)


def _offered(raw: msgspec.Raw) -> list[dict[str, Any]]:
    if not raw:
        return []
    if len(memoryview(raw)) > MAX_TOOLS_SIZE:
        raise bad_request(f"tools may have at most {MAX_TOOLS_SIZE} bytes", "tools")
    body = bytes(raw)
    checked = decode(body, list[Tool] | None, "tools") or []  # type: ignore[arg-type]
    if len(checked) > MAX_TOOLS:
        raise bad_request(f"tools may hold at most {MAX_TOOLS} tools, not {len(checked)}", "tools")
    seen = set()
    for index, tool in enumerate(checked):
        _check(tool, f"tools[{index}].function")
        if tool.function.name in seen:
            raise bad_request(f"tools has {tool.function.name!r} twice", f"tools[{index}].function.name")
        seen.add(tool.function.name)
    written: list[dict[str, Any]] = msgspec.json.decode(body) or []
    for tool_ in written:
        tool_["function"].pop("strict", None)  # not for the model
    return written


def _check(tool: Tool, where: str) -> None:
    if not _NAME.fullmatch(tool.function.name):
        raise bad_request(
            f"{where}.name must be 1 to 64 letters, digits, underscores or dashes", f"{where}.name"
        )
    kind = (tool.function.parameters or {}).get("type", "object")
    if kind != "object":
        raise bad_request(
            f"{where}.parameters must be a JSON schema of an object (type: 'object')", f"{where}.parameters"
        )
