"""Schemas of functions that calls have to keep to: one that nothing can meet, or that can't be enforced, is a
400 about that function, in the client's own words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker import chat_templates
from tests.worker.fake_engine import MODEL, in_process
from tests.worker.talking import ASK, CALL, NOW, WEATHER, chat, post, worker
from worker.server.state import ServerState

NAMED = {"type": "function", "function": {"name": "f"}}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "required": ({"tool_choice": "required"}, False),
    "named": ({"tool_choice": NAMED}, False),
    "strict": ({}, True),
}
NONE_MEETS = "no answer can have this form"
SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, NONE_MEETS),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, NONE_MEETS),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, NONE_MEETS),
    ({"properties": {"a": False}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
    ({"properties": {"a": {"$ref": "#/$defs/nowhere"}}}, "a $ref leads to '#/$defs/nowhere', which"),
    ({"properties": {"a": {"$ref": "https://a.example/b"}}}, "a $ref leads to 'https://a.example/b'; only"),
    ({"$defs": {"a": {"enum": []}}, "$ref": "#/$defs/a"}, "anyOf is empty\n  while processing #/$defs/a"),
    ({"properties": {"a": {"not": {"type": "string"}}}}, 'keywords that can\'t be enforced: ["not"]'),
]


def qwen() -> ServerState:
    return worker(CALL, chat_templates.QWEN25)


def function(parameters: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    kind = {} if "$ref" in parameters else {"type": "object"}
    return {"name": "f", "parameters": {**kind, **parameters}, "strict": strict}


@pytest.mark.parametrize("way", WAYS)
async def test_a_schema_that_cannot_be_used_is_told_as_the_client_wrote_it(way: str) -> None:
    state = qwen()
    fields, strict = WAYS[way]
    for parameters, why in SCHEMAS:
        tools = [WEATHER, NOW, {"type": "function", "function": function(parameters, strict)}]
        answer = await post(state, messages=ASK, tools=tools, **fields)
        place = "tools[2].function.parameters"
        assert answer.status_code == 400, parameters
        assert answer.json()["error"]["param"] == place
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{place} can't be used: ")
        assert why in message
        assert "json-schema:" not in message


async def test_the_place_is_that_in_all_tools_where_some_are_allowed() -> None:
    tools = [WEATHER, {"type": "function", "function": function({"$ref": "#"})}]
    for mode in ("required", "auto"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
        answer = await post(qwen(), messages=ASK, tools=tools, tool_choice=choice)
        if mode == "required":
            assert answer.json()["error"]["param"] == "tools[1].function.parameters"
        else:  # the model calls as it likes
            assert answer.status_code == 200


async def test_functions_that_are_not_called_need_no_schema_that_can_be_met() -> None:
    tools = [NOW, {"type": "function", "function": function({"$ref": "#"})}]
    choice = {"type": "function", "function": {"name": "now"}}
    assert (await chat(worker("{}", chat_templates.QWEN25), tools=tools, tool_choice=choice))["choices"]


async def test_functions_of_responses_have_a_level_less() -> None:
    tools = [{"type": "function", **function({"$ref": "#"})}]
    body = {"model": MODEL, "input": "Hi", "tools": tools, "tool_choice": "required"}
    async with in_process(qwen()) as client:
        answer = await client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].parameters")
