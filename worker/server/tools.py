"""What a request says of tools: checked, and as the form that a forced call must have."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from contracts.errors import bad_request
from worker.params import ParamError, SamplingParams, StructuredOutputs
from worker.server.decoding import decode
from worker.server.references import moved
from worker.server.schemas import MAX_TOOLS, MAX_TOOLS_SIZE, FlatTool, Function, Sampling, Tool
from worker.server.state import ServerState
from worker.server.strict import strict_grammar
from worker.server.structured import check_form, check_forms, with_form
from worker.server.text_model import TextModel
from worker.text.answer import Reader
from worker.text.calls import CallFormat, MarkedCalls
from worker.text.calls.forced import LIST_OF_CALLS, NamedCall

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_DEFINITIONS: Final = ("$defs", "definitions")
_CHOICES: Final = (
    "tool_choice must be 'auto', 'none', 'required', a function of tools by its name, or allowed_tools"
)


class Offered(NamedTuple):
    """The tools of a request, as the model sees them; which functions are `strict`; and by name of a function
    the request's field that has its parameters."""

    tools: Sequence[dict[str, Any]] = ()
    strict: frozenset[str] = frozenset()
    fields: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request offers, and how they may be called.

    Args:
        tools: as the client wrote them, for the chat template.
        names: of their functions.
        required: the answer is at least one call.
        named: the answer is a call of this function.
        most: calls that an answer may have; None: any number.
        strict: functions whose arguments keep to their schema also where the model may call or not.
        fields: by name of a function, the request's field that has its parameters.
    """

    tools: Sequence[dict[str, Any]]
    names: Sequence[str]
    required: bool = False
    named: str | None = None
    most: int | None = None
    strict: frozenset[str] = frozenset()
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def forced(self) -> bool:
        return self.required or self.named is not None

    def form(self) -> StructuredOutputs:
        """What a forced answer must look like. ApiError 400 for schemas that are too long or deep."""
        with _usable("parameters of tools, as a schema"):
            schema = self._parameters(self.named) if self.named is not None else self._list_of_calls()
            return StructuredOutputs(json=json.dumps(schema))

    def strict_form(self, text: TextModel) -> StructuredOutputs | None:
        """What keeps calls of strict functions to their schemas where none is forced; None: nothing does.
        ApiError 400 for schemas that are too long together."""
        if self.forced or not self.strict or text.calls is None or text.tokenizer is None:
            return None
        token = text.tokenizer.token_id(text.calls.marks[0].start)
        special = token is not None and token in text.tokenizer.special_ids
        with _usable("parameters of strict tools, as a grammar"):
            grammar = strict_grammar(text.calls, self.tools, self.strict, special=special)
            return StructuredOutputs(grammar=grammar) if grammar is not None else None

    def schemas(self) -> Iterator[tuple[str, StructuredOutputs]]:
        """Each schema that a call may have to keep to, by itself, and the field that has it: in the form of a
        whole answer, one that nothing can meet is not seen among others. ApiError 400 for those that are too
        long or deep."""
        bound = {self.named} if self.named is not None else set(self.names) if self.required else self.strict
        for tool in self.tools:
            name, parameters = tool["function"]["name"], tool["function"].get("parameters")
            if name in bound and parameters:
                place = self.fields[name]
                with _usable(f"schema in {place}", place):
                    yield place, StructuredOutputs(json=json.dumps(parameters))

    def reader(self, format: CallFormat | None) -> Reader | None:
        """A reader of one answer's calls; None where nobody knows how the model writes them."""
        if self.named is not None:
            return NamedCall(self.named)
        if self.required:
            return MarkedCalls(LIST_OF_CALLS, self.names)
        if format is None:
            return None
        functions = (tool["function"] for tool in self.tools)
        return MarkedCalls(format, {one["name"]: one.get("parameters") or {} for one in functions})

    def _parameters(self, name: str) -> dict[str, Any]:
        function = next(tool["function"] for tool in self.tools if tool["function"]["name"] == name)
        return function.get("parameters") or {
            "type": "object", "properties": {}, "additionalProperties": False,
        }  # fmt: skip

    def _list_of_calls(self) -> dict[str, Any]:
        """Each function's parameters are a definition, with whatever they refer to inside."""
        schema: dict[str, Any] = {"type": "array", "minItems": 1}
        if self.most is not None:
            schema["maxItems"] = self.most
        kinds, parameters = [], {}
        for name in self.names:
            place = f"/$defs/{name}"
            parameters[name] = moved(self._parameters(name), place)
            kinds.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": {"$ref": f"#{place}"}},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        items = {"anyOf": kinds} if len(kinds) > 1 else kinds[0]
        return {**schema, "items": items, "$defs": parameters}


def tool_use(
    offered: Offered, tool_choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """How the tools of a request (of `chat_tools` or `flat_tools`) may be used; None: not at all."""
    tools, strict, fields = offered
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        tools, tool_choice = _allowed(tool_choice, tools)
    names = [tool["function"]["name"] for tool in tools]
    if tool_choice == "none":
        return None
    most = 1 if parallel is False else None
    if tool_choice in (None, "auto"):
        return ToolUse(tools, names, most=most, strict=strict.intersection(names), fields=fields)
    if tool_choice == "required":
        return ToolUse(tools, names, required=True, most=most, fields=fields)
    return ToolUse(tools, names, named=_named(tool_choice, names), most=most, fields=fields)


def _allowed(choice: dict[str, Any], offered: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The tools among those offered that may be called, and how: "auto" or "required". In chats both are in
    `allowed_tools`, in responses beside it."""
    inner = choice.get("allowed_tools", choice)
    mode, listed = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise bad_request(
            "tool_choice: the mode of allowed_tools must be 'auto' or 'required'", "tool_choice"
        )
    if not isinstance(listed, list) or not listed:
        raise bad_request("tool_choice: allowed_tools must list at least one of tools", "tool_choice")
    names = [tool["function"]["name"] for tool in offered]
    allowed = {_named(tool if isinstance(tool, dict) else None, names) for tool in listed}
    return [tool for tool in offered if tool["function"]["name"] in allowed], mode


def with_tools(
    request: Sampling, params: SamplingParams, tools: ToolUse | None, text: TextModel
) -> SamplingParams:
    """`params` with the form that calls give to the answer, where they do. ApiError 400 where another field
    asks for a form beside a forced call; beside strict functions that other form counts."""
    if tools is None:
        return params
    if tools.forced:
        return with_form(request, params, tools.form(), "tool_choice")
    form = tools.strict_form(text) if params.structured_outputs is None else None
    return params if form is None else msgspec.structs.replace(params, structured_outputs=form)


async def check_calls(state: ServerState, tools: ToolUse | None, params: SamplingParams, field: str) -> None:
    """As check_form of the form that `field` asks for; where that is "tools", a schema in them that can't be
    used is told as that of its function."""
    if field == "tools" and tools is not None and params.structured_outputs is not None:
        await check_forms(state, tools.schemas())
    await check_form(state, params, field)


@contextlib.contextmanager
def _usable(what: str, param: str = "tools") -> Iterator[None]:
    """ApiError 400 about `param` where a form is made of `what`, and can't be."""
    try:
        yield
    except RecursionError:
        raise bad_request(f"The {what}: nested too deeply", param) from None
    except ParamError as error:
        raise bad_request(f"The {what}: {error}", param) from error


def _named(tool_choice: str | dict[str, Any] | None, names: Sequence[str]) -> str:
    """The function's name is in `function` in chats, and beside it in responses."""
    choice = tool_choice if isinstance(tool_choice, dict) else {}
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or name is None:
        raise bad_request(_CHOICES, "tool_choice")
    if name not in names:
        raise bad_request(f"tool_choice names {str(name)[:64]!r}, which tools don't have", "tool_choice")
    return str(name)


def chat_tools(raw: msgspec.Raw) -> Offered:
    """`tools` of a chat, checked, as the model sees them. ApiError 400 names what is wrong with them."""
    if not raw:
        return Offered()
    body = _bounded(raw)
    tools = decode(body, list[Tool] | None, "tools") or []  # type: ignore[arg-type]
    functions = [tool.function for tool in tools]
    shown = [_for_model(tool["function"]) for tool in msgspec.json.decode(body) or []]
    return _offered(shown, functions, "tools[%d].function")


def flat_tools(raw: msgspec.Raw) -> Offered:
    """`tools` of a response, which are functions without a level of their own; else as `chat_tools`."""
    if not raw:
        return Offered()
    body = _bounded(raw)
    functions = decode(body, list[FlatTool] | None, "tools") or []  # type: ignore[arg-type]
    return _offered([_for_model(tool) for tool in msgspec.json.decode(body) or []], functions, "tools[%d]")


def _offered(shown: Sequence[dict[str, Any]], functions: Sequence[Function], place: str) -> Offered:
    """`place`: the path of a function's fields, by its index."""
    _check(functions, place)
    strict = frozenset(function.name for function in functions if function.strict)
    return Offered(
        shown, strict, {one.name: f"{place % index}.parameters" for index, one in enumerate(functions)}
    )


def _bounded(raw: msgspec.Raw) -> bytes:
    if len(memoryview(raw)) > MAX_TOOLS_SIZE:
        raise bad_request(f"tools may have at most {MAX_TOOLS_SIZE} bytes", "tools")
    return bytes(raw)


def _for_model(function: dict[str, Any]) -> dict[str, Any]:
    """The client's own words and order, without what says nothing to a model."""
    shown = {key: value for key, value in function.items() if key in ("name", "description", "parameters")}
    return {"type": "function", "function": shown}


def _check(functions: Sequence[Function], place: str) -> None:
    if len(functions) > MAX_TOOLS:
        raise bad_request(f"tools may hold at most {MAX_TOOLS} tools, not {len(functions)}", "tools")
    seen = set()
    for index, function in enumerate(functions):
        where = place % index
        name, parameters = function.name, function.parameters or {}
        if not _NAME.fullmatch(name):
            raise bad_request(
                f"{where}.name must be 1 to 64 letters, digits, underscores or dashes", f"{where}.name"
            )
        if name in seen:
            raise bad_request(f"tools has {name!r} twice", f"{where}.name")
        seen.add(name)
        if parameters.get("type", "object") != "object":
            raise bad_request(
                f"{where}.parameters must be a JSON schema of an object (type: 'object')",
                f"{where}.parameters",
            )
        for key in _DEFINITIONS:
            if not isinstance(parameters.get(key, {}), dict):
                raise bad_request(f"{where}.parameters.{key} must be an object", f"{where}.parameters")
