"""Forms of answers in requests: what reaches the engine, and what is refused with which field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.worker.fake_engine import MODEL, FakeEngine, in_process, make_state
from worker.ipc.client import RequestStream
from worker.ipc.messages import EngineRequest, RequestOutput
from worker.params import MAX_CHOICES, MAX_GRAMMAR, MAX_REGEX, MAX_SCHEMA, StructuredOutputs
from worker.server.state import ServerState

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/generate": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


@pytest.fixture
async def state() -> AsyncIterator[ServerState]:
    state = make_state(FakeEngine())
    yield state
    if state.grammars is not None:
        await asyncio.to_thread(state.grammars.close)


async def post(state: ServerState, path: str, **fields: Any) -> Any:
    async with in_process(state) as client:
        return await client.post(path, json={"model": MODEL, **ROUTES[path], **fields}, timeout=120)


FORMS: list[tuple[dict[str, Any], StructuredOutputs]] = [
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    ({"response_format": schema_format(SCHEMA, strict=True)}, StructuredOutputs(json=TEXT)),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=TEXT)),
    ({"structured_outputs": {"json": TEXT}}, StructuredOutputs(json=TEXT)),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
    ({"structured_outputs": {"regex": "a+", "json": None}}, StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=TEXT)),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
]


@pytest.mark.parametrize("path", ROUTES)
async def test_every_spelling_reaches_the_engine(state: ServerState, path: str) -> None:
    engine = state.engine
    assert isinstance(engine, FakeEngine)
    for fields, form in FORMS:
        response = await post(state, path, **fields)
        assert response.status_code == 200, response.text
        assert engine.submitted[-1].params.structured_outputs == form, fields


async def test_without_a_form_nothing_is_checked(state: ServerState) -> None:
    nothing = {"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None}
    response = await post(state, "/v1/completions", **nothing)
    assert response.status_code == 200
    assert state.grammars is None


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
    ({"response_format": schema_format({"type": "x"})}, "response_format.json_schema.schema", "x"),
    ({"response_format": schema_format([1])}, "response_format.json_schema.schema", "must be an object"),
    ({"structural_tag": {"format": {}}}, "structural_tag", "not supported"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "Expected"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "a" * (MAX_REGEX + 1)}}, "structured_outputs.regex", str(MAX_REGEX)),
    ({"structured_outputs": {"json": '{"a":'}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "1 to"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", str(MAX_CHOICES)),
    ({"guided_choice": [1]}, "guided_choice[0]", "Expected"),
    ({"guided_grammar": "x" * (MAX_GRAMMAR + 1)}, "guided_grammar", str(MAX_GRAMMAR)),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
    ({"guided_json": {"$ref": "https://example.com/a.json"}}, "guided_json", "https://example.com/a.json"),
    ({"guided_json": {"enum": ["x" * MAX_SCHEMA]}}, "guided_json", str(MAX_SCHEMA)),
    ({"guided_json": "x" * 5 * MAX_SCHEMA}, "guided_json", str(MAX_SCHEMA)),
    (
        {"guided_json": {"type": "object"}, "guided_regex": "a"},
        "guided_regex",
        "guided_json and guided_regex",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
        "structured_outputs.choice",
        "response_format and structured_outputs.choice",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "both"),
]


async def test_what_cannot_be_used_is_a_400_that_names_the_field(state: ServerState) -> None:
    engine = state.engine
    assert isinstance(engine, FakeEngine)
    for fields, param, part in BAD:
        response = await post(state, "/v1/chat/completions", **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (fields, error)
        assert part in error["message"], error
        assert len(error["message"]) < 1000
    assert not engine.submitted


async def test_a_forced_call_and_a_form_do_not_go_together(state: ServerState) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    response = await post(
        state,
        "/v1/chat/completions",
        tools=[tool],
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert response.status_code == 400
    assert "tool_choice" in response.json()["error"]["message"]


async def test_a_model_without_a_tokenizer_can_have_no_form() -> None:
    state = make_state(FakeEngine())
    assert state.text is not None
    state.text.tokenizer = None
    async with in_process(state) as client:
        body = {"model": MODEL, "prompt": [1, 2], "guided_regex": "a"}
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_regex"


async def test_what_only_the_engine_finds_is_a_400_too(state: ServerState) -> None:
    class Refusing(FakeEngine):
        def submit(self, request: EngineRequest) -> RequestStream:
            stream = RequestStream()
            reason = "structured output: it can't be compiled"
            stream.put(
                RequestOutput(request.request_id, [], finish_reason="error", error=reason, refused=True)
            )
            return stream

    state.engine = Refusing()
    response = await post(state, "/v1/completions", guided_regex="a")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["param"]) == (
        "structured output: it can't be compiled", "guided_regex",
    )  # fmt: skip
