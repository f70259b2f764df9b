"""What clients may send without bound, depth and length: a 400 that stays short, and never a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.errors import MAX_MESSAGE, ApiError
from tests.worker import chat_templates
from tests.worker.fake_engine import MODEL, in_process, make_state, strict_json
from tests.worker.talking import ASK, CALL, WEATHER, worker
from worker.server.state import ServerState

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LONG = "x" * 300_000
NESTED = {
    "lists": ("[", "]"),
    "objects": ('{"a":', "}"),
    "properties": ('{"type":"object","properties":{"a":', "}}"),
    "items": ('{"type":"array","items":', "}"),
    "alternatives": ('{"anyOf":[', "]}"),
}


async def post(state: ServerState, path: str, body: str) -> tuple[int, Any]:
    async with in_process(state) as client:
        answer = await client.post(path, content=body)
    return answer.status_code, strict_json(answer.content)


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("depth", [90, 240, 330, 490, 960, 5000])
async def test_what_is_nested_deeply_is_served_or_refused(kind: str, depth: int) -> None:
    """Wherever a client can nest: each place is walked by other code, as deep as Python lets it."""
    begin, end = NESTED[kind]
    deep = begin * depth + "0" + end * depth
    function = f'"name":"get_weather","parameters":{{"type":"object","properties":{{"a":{deep}}}}}'
    tool = f'{{"type":"function","function":{{"strict":STRICT,{function}}}}}'
    flat = f'{{"type":"function","strict":true,{function}}}'
    messages = f'"model":"{MODEL}","messages":{json.dumps(ASK)}'
    called = json.dumps({"name": "get_weather", "arguments": f'{{"a":{deep}}}'})
    earlier = f'{{"role":"assistant","tool_calls":[{{"id":"c","type":"function","function":{called}}}]}}'
    named = '{"type":"function","function":{"name":"get_weather"}}'
    bodies = [
        *(
            (CHAT, f'{{{messages},"tools":[{tool.replace("STRICT", strict)}],"tool_choice":{choice}}}')
            for strict, choice in (
                ("true", '"auto"'), ("false", '"auto"'), ("false", '"required"'), ("false", named),
            )
        ),
        (CHAT, f'{{{messages},"chat_template_kwargs":{{"a":{deep}}}}}'),
        (CHAT, f'{{{messages},"guided_json":{deep}}}'),
        (CHAT, f'{{{messages},"unknown":{deep}}}'),
        (CHAT, f'{{"model":"{MODEL}","messages":[{earlier}]}}'),
        (RESPONSES, f'{{"model":"{MODEL}","input":"Hi","tools":[{flat}]}}'),
        (RESPONSES, f'{{"model":"{MODEL}","input":"Hi","text":{{"format":{{"type":"json_schema","name":"a",'
                    f'"schema":{{"a":{deep}}}}}}}}}'),
        ("/tokenize", f'{{{messages},"tools":[{tool.replace("STRICT", "true")}]}}'),
    ]  # fmt: skip
    state = worker(CALL, chat_templates.QWEN25)
    try:
        for path, body in bodies:
            status, answer = await post(state, path, body)
            assert status in (200, 400), (path, body[:200], answer)
    finally:
        if state.grammars is not None:
            state.grammars.close()


async def test_strict_functions_that_are_nested_too_deeply_are_named() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {**WEATHER, "function": {**WEATHER["function"], "parameters": deep, "strict": True}}  # type: ignore[dict-item]
    body = json.dumps({"model": MODEL, "messages": ASK, "tools": [tool]})
    status, answer = await post(worker(CALL, chat_templates.QWEN25), CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "nested too deeply" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [
        (CHAT, {"messages": [{"role": LONG, "content": "Hi"}]}, "'function'."),
        (CHAT, {"messages": ASK, "reasoning_effort": LONG}, "'max'."),
        (CHAT, {"messages": ASK, "tool_choice": LONG}, "no tools"),
        (CHAT, {"messages": ASK, "response_format": {"type": LONG}}, ""),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": LONG}}}, "'json_schema'."),
        (RESPONSES, {"input": [{"type": LONG}]}, ""),
        (RESPONSES, {"input": "Hi", "include": [LONG]}, ""),
        ("/v1/completions", {"prompt": "Hi", "n": 10**4000}, "000"),
        ("/v1/completions", {"prompt": "Hi", "guided_regex": "x" * 16_000 + "("}, "unclosed group"),
        ("/generate", {"prompt": "Hi", "priority": 10**4000}, ""),
    ],
)
async def test_an_error_quotes_little_of_what_was_sent(path: str, fields: dict[str, Any], end: str) -> None:
    """And keeps its own end: which words or numbers there are."""
    state = make_state()
    status, answer = await post(state, path, json.dumps({"model": MODEL, **fields}))
    if state.grammars is not None:
        state.grammars.close()
    message = answer["error"]["message"]
    assert status == 400
    assert len(message) < MAX_MESSAGE + 10
    assert message.endswith(end)


def test_every_error_is_bounded() -> None:
    error = ApiError(400, f"begins {LONG} ends")
    assert error.message == str(error)
    assert (error.message[:7], error.message[-5:]) == ("begins ", " ends")
    assert len(error.message) < MAX_MESSAGE + 10
    exact = "x" * MAX_MESSAGE
    assert ApiError(400, exact).message == exact


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/embeddings", {"messages": ASK}, "messages"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/completions", {"prompt_embeds": None}, "prompt"),
        ("/v1/embeddings", {"unknown": 1}, "input"),
    ],
)
async def test_what_is_sent_in_the_place_of_a_field_and_refused_is_named(
    path: str, fields: dict[str, Any], param: str
) -> None:
    status, answer = await post(make_state(), path, json.dumps({"model": MODEL, **fields}))
    assert (status, answer["error"]["param"]) == (400, param)
