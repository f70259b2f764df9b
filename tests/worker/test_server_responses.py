"""POST /v1/responses against an engine that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.worker import chat_templates
from tests.worker.fake_engine import MODEL, in_process, serving, strict_json
from tests.worker.talking import CALL, COLOGNE, NOW_CALL, PARAMETERS, engine_of, prompt_of, worker
from worker.server.state import ServerState

THOUGHT = "<think>\nHm.\n</think>\n\n"
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": PARAMETERS,
        "strict": True,
    },
    {"type": "function", "name": "now"},
]


async def post(state: ServerState, **fields: Any) -> Any:
    async with in_process(state) as client:
        return await client.post("/v1/responses", json={"model": MODEL, "input": "Hi", **fields})


async def respond(state: ServerState, **fields: Any) -> dict[str, Any]:
    answer = await post(state, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = strict_json(answer.content)
    return body


async def events_of(state: ServerState, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are right."""
    answer = await post(state, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    events = []
    for number, frame in enumerate(frames[:-2]):
        name, data = frame.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def test_a_whole_response() -> None:
    state = worker("Hello!", chat_templates.QWEN25)
    body = await respond(
        state, instructions="Be brief.", metadata={"a": "b"}, user="u", store=True, temperature=0.5
    )
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    assert item["content"] == [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert prompt_of(state).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert body["id"].startswith("resp_")
    expected: dict[str, Any] = {
        "object": "response", "status": "completed", "model": MODEL, "error": None, "user": "u",
        "incomplete_details": None, "instructions": "Be brief.", "metadata": {"a": "b"}, "store": False,
        "temperature": 0.5, "top_p": 1.0, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "background": False, "previous_response_id": None, "truncation": "disabled",
        "text": {"format": {"type": "text"}},
    }  # fmt: skip
    assert {key: body[key] for key in expected} == expected
    usage = body["usage"]
    assert usage["output_tokens"] == len("Hello!") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    Response.model_validate(body, strict=False)


@pytest.mark.parametrize("per_step", [1, 5, 1000])
async def test_events_tell_the_same_as_the_whole_response(per_step: int) -> None:
    answer = f"{THOUGHT}Let me look.\n{CALL}\n{NOW_CALL}\nDone."
    whole = await respond(worker(answer, per_step=per_step), tools=TOOLS)
    events = await events_of(worker(answer, per_step=per_step), tools=TOOLS)
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == "response.completed"
    built = build(events)
    assert without_ids(built) == without_ids(events[-1]["response"]["output"])
    assert without_ids(built) == without_ids(whole["output"])
    assert [item["id"] for item in built] == [item["id"] for item in events[-1]["response"]["output"]]


def build(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items put together from their events alone; each event must fit those before it."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert all(item["status"] == "completed" for item in items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind.split(".")[1:]:
            case ["content_part", "added"]:
                assert event["content_index"] == len(item["content"])
                item["content"].append(event["part"])
            case ["output_text" | "reasoning_text", "delta"]:
                item["content"][event["content_index"]]["text"] += event["delta"]
            case ["output_text" | "reasoning_text", "done"]:
                assert item["content"][event["content_index"]]["text"] == event["text"]
            case ["content_part", "done"]:
                assert item["content"][event["content_index"]] == event["part"]
            case ["function_call_arguments", "delta"]:
                item["arguments"] += event["delta"]
            case ["function_call_arguments", "done"]:
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case ["output_item", "done"]:
                item["status"] = event["item"]["status"]
                assert item == event["item"]
            case other:
                raise AssertionError(other)
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


async def test_a_response_that_is_cut_is_incomplete() -> None:
    body = await respond(worker("Hello, world!"), max_output_tokens=5)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["output"][0]["content"][0]["text"] == "Hello"
    events = await events_of(worker("Hello, world!"), max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"


async def test_an_answer_without_text_is_an_empty_message() -> None:
    body = await respond(worker(""))
    assert [item["content"][0]["text"] for item in body["output"]] == [""]


async def test_calls_and_their_outputs_go_back_into_the_conversation() -> None:
    state = worker("20 degrees.")
    first = await respond(worker(f"{THOUGHT}Let me look.\n{CALL}"), tools=TOOLS, input="Weather?")
    call = first["output"][-1]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "20"},
    ]
    await respond(state, input=items, tools=TOOLS)
    assert prompt_of(state).partition("<|im_start|>user\n")[2] == (
        "Weather?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLet me look.\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n20\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_each_turn_of_the_assistant_is_a_message() -> None:
    state = worker("ok", chat_templates.QWEN25)
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "assistant", "content": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "now", "arguments": "{}"},
        {"type": "message", "role": "developer", "content": "x"},
    ]
    await respond(state, input=items)
    prompt = prompt_of(state)
    assert prompt.startswith(
        f"<|im_start|>assistant\none<|im_end|>\n<|im_start|>assistant\ntwo\n{NOW_CALL}\n{NOW_CALL}<|im_end|>\n"
    )


async def test_thinking_can_be_switched_off() -> None:
    state = worker("Yes.")
    await respond(state, reasoning={"effort": "none"})
    assert prompt_of(state).endswith("<think>\n\n</think>\n\n")


async def test_reasoning_tokens_are_counted() -> None:
    body = await respond(worker(f"{THOUGHT}Yes."))
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>")}


async def test_log_probabilities_come_with_the_text() -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    body = await respond(worker("Hello", chat_templates.QWEN25), **fields)
    tokens = body["output"][0]["content"][0]["logprobs"]
    assert [token["token"] for token in tokens] == list("Hello")
    assert all(len(token["top_logprobs"]) == 1 for token in tokens)
    events = await events_of(worker("Hello", chat_templates.QWEN25), **fields)
    streamed = [token["token"] for e in events if e["type"].endswith("text.delta") for token in e["logprobs"]]
    assert streamed == list("Hello")


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}, "json"),
    ],
)
async def test_formats_of_text_are_forms_for_the_engine(format: dict[str, Any], kind: str) -> None:
    state = worker(COLOGNE, chat_templates.QWEN25)
    body = await respond(state, text={"format": format})
    form = engine_of(state).submitted[0].params.structured_outputs
    assert form is not None
    assert form.json_object is (kind == "json_object")
    assert isinstance(form.json, str) is (kind == "json")
    assert not isinstance(form.json, str) or json.loads(form.json) == PARAMETERS
    assert body["output"][0]["content"][0]["text"] == COLOGNE


@pytest.mark.parametrize(
    ("tool_choice", "answer"),
    [
        ("required", f'[{{"name": "get_weather", "parameters": {COLOGNE}}}]'),
        ({"type": "function", "name": "get_weather"}, COLOGNE),
    ],
)
async def test_forced_calls(tool_choice: Any, answer: str) -> None:
    state = worker(answer)
    body = await respond(state, tools=TOOLS, tool_choice=tool_choice)
    assert [(item["name"], item["arguments"]) for item in body["output"]] == [("get_weather", COLOGNE)]
    assert body["tool_choice"] == tool_choice
    assert engine_of(state).submitted[0].params.structured_outputs is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"temperature": 9}, "temperature"),
        ({"input": "x" * 40_000}, "input"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    answer = await post(worker("x"), **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("name", ["prompt", "messages"])
async def test_what_is_sent_in_the_place_of_input_is_named(name: str) -> None:
    async with in_process(worker("x")) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, name: "Hi"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert "input" in error["message"]


async def test_an_engine_that_dies_ends_the_stream_with_an_error() -> None:
    state = worker("Hello, world!", step_seconds=0.05)
    engine = engine_of(state)
    async with serving(state) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        kinds = [event.type async for event in aiter_until_text(stream)]
        engine.die()
        with pytest.raises(openai.APIError, match="engine"):
            kinds += [event.type async for event in stream]
    assert "response.completed" not in kinds


async def aiter_until_text(stream: Any) -> AsyncIterator[Any]:
    async for event in stream:
        yield event
        if event.type == "response.output_text.delta":
            return


async def test_the_sdk_reads_streams_and_parses_calls() -> None:
    state = worker(f"{THOUGHT}Let me look.\n{CALL}")
    async with serving(state) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        api: Any = client.responses
        whole = await api.create(model=MODEL, input="Weather?", tools=TOOLS)
        async with api.stream(model=MODEL, input="Weather?", tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert whole.output_text == final.output_text == "Let me look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[-1].parsed_arguments == json.loads(COLOGNE)
    assert kinds[-1] == "response.completed"
