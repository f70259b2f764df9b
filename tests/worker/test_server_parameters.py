"""Every parameter of OpenAI's SDK, and those of vLLM's: served, accepted without effect, or refused."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from openai.types import EmbeddingCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponsesParams

from tests.test_docs import API, first_cells
from tests.worker.fake_engine import MODEL, FakeEngine, in_process, make_state, strict_json
from worker.server.not_offered import refused_fields
from worker.server.responses_input import ResponsesRequest
from worker.server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, GenerateRequest

HELLO = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": HELLO}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/generate": (GenerateRequest, {"prompt": "Hi"}),
}
WITHOUT_EFFECT = first_cells(API, "field", "Accepted without effect")
# What is so anyway, beside null, false and the empty list.
NEUTRAL = {
    "length_penalty": 1.0, "truncation_side": "left", "thinking_token_budget": -1, "vllm_xargs": {},
    "function_call": "none", "modalities": ["text"], "verbosity": "medium", "suffix": "",
}  # fmt: skip


async def post(path: str, **fields: Any) -> tuple[int, Any, FakeEngine]:
    engine = FakeEngine()
    async with in_process(make_state(engine)) as client:
        answer = await client.post(path, json={"model": MODEL, **ROUTES[path][1], **fields})
    return answer.status_code, strict_json(answer.content), engine


@pytest.mark.parametrize(
    ("params", "request_type"),
    [
        (ChatParams, ChatRequest),
        (CompletionParams, CompletionRequest),
        (ResponsesParams, ResponsesRequest),
        (EmbeddingCreateParams, EmbeddingRequest),
    ],
)
def test_every_parameter_of_the_sdk_is_decided_about(params: Any, request_type: type[msgspec.Struct]) -> None:
    known = set(typing.get_type_hints(params))
    assert len(known) > 4
    assert known - set(request_type.__struct_fields__) - set(WITHOUT_EFFECT) == set()


@pytest.mark.parametrize("path", ROUTES)
async def test_what_changes_an_answer_and_is_not_there_is_refused_by_name(path: str) -> None:
    names = refused_fields(ROUTES[path][0])
    assert {"use_beam_search", "length_penalty", "early_stopping"} <= set(names)
    for name in names:
        for wanted in ({"some": "thing"}, "something", 0.5):
            status, body, engine = await post(path, **{name: wanted})
            assert (status, body["error"]["param"]) == (400, name), (name, wanted)
            assert ROUTES[path][0].not_offered[name].why in body["error"]["message"]
            assert engine.submitted == []


@pytest.mark.parametrize("path", ROUTES)
async def test_what_says_what_is_so_anyway_is_accepted(path: str) -> None:
    names = refused_fields(ROUTES[path][0])
    for empty in (None, False, list[int]()):
        assert (await post(path, **dict.fromkeys(names, empty)))[0] == 200
    fields = {name: value for name, value in NEUTRAL.items() if name in names}
    status, body, _ = await post(path, **fields, best_of=1)
    assert status == 200, body
    assert set(fields) == {name for name in names if ROUTES[path][0].not_offered[name].neutral}


@pytest.mark.parametrize("path", ROUTES)
async def test_what_changes_nothing_is_accepted(path: str) -> None:
    values = {"metadata": {"a": "b"}, "store": True, "user": "me"}
    fields = {name: values.get(name, "something") for name in WITHOUT_EFFECT}
    assert set(values) <= set(fields)
    status, body, engine = await post(path, **fields, nobody_knows_this=5)
    assert status == 200, body
    (request,) = engine.submitted
    _, _, plain = await post(path)
    assert request.params == plain.submitted[0].params


async def test_a_wrong_word_lists_those_there_are() -> None:
    chats, responses = "/v1/chat/completions", "/v1/responses"
    roles = "'system', 'developer', 'user', 'assistant'"
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (
            chats,
            {"messages": [*HELLO, {"role": "wizard", "content": "Hi"}]},
            "messages[1].role",
            f"{roles}, 'tool', 'function'",
        ),
        (chats, {"tools": [{"type": "custom"}]}, "tools[0].type", "'function'"),
        (responses, {"input": [{"role": "wizard", "content": "Hi"}]}, "input[0].role", roles),
        (
            responses,
            {"text": {"format": {"type": "xml"}}},
            "text.format.type",
            "'text', 'json_object', 'json_schema'",
        ),
    ]
    for path, fields, param, allowed in cases:
        status, body, _ = await post(path, **fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["message"].endswith(f"it is one of {allowed}."), body
