"""The Responses API as OpenAI's SDK reads it, through gateway and worker."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.conformance.test_reasoning import REASONING, THOUGHT
from tests.conformance.test_tools import COLOGNE, NOW, PARAMETERS, WEATHER

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "strict": True, "parameters": PARAMETERS},
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]


def create(client: OpenAI, answer: str, **fields: Any) -> Any:
    return client.responses.create(model="scripted", input=f"SAY:{answer}", **fields)


def test_a_text(scripted: OpenAI) -> None:
    response = create(scripted, "Hello, naïve 🙂!", metadata={"a": "b"}, store=False)
    assert response.output_text == "Hello, naïve 🙂!"
    assert (response.status, response.metadata, response.store) == ("completed", {"a": "b"}, False)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    Response.model_validate(response.model_dump())


def test_instructions_and_messages(scripted: OpenAI) -> None:
    items: Any = [
        {"role": "system", "content": "SAY:no"},
        {"role": "user", "content": [{"type": "input_text", "text": "SAY:yes"}]},
    ]
    response = scripted.responses.create(model="scripted", instructions="SAY:never", input=items)
    assert response.output_text == "yes"


def test_a_text_that_is_cut(scripted: OpenAI) -> None:
    response = create(scripted, "Hello, world!", max_output_tokens=5)
    assert (response.status, response.output_text) == ("incomplete", "Hello")
    assert response.incomplete_details.reason == "max_output_tokens"


def test_all_kinds_of_items(scripted: OpenAI) -> None:
    response = create(scripted, f"{THOUGHT}Let me see.\n{WEATHER}\n{NOW}", tools=TOOLS)
    reasoning, message, weather, now = response.output
    assert reasoning.content[0].text == REASONING
    assert message.content[0].text == response.output_text == "Let me see."
    assert (weather.name, weather.arguments, now.name, now.arguments) == ("get_weather", COLOGNE, "now", "{}")
    assert weather.call_id != now.call_id
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_conversation_with_results(scripted: OpenAI) -> None:
    items: Any = [{"role": "user", "content": f"SAY:{THOUGHT}{WEATHER}"}]
    first = scripted.responses.create(model="scripted", input=items, tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    items += [item.model_dump() for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "20"},
        {"role": "user", "content": "SAY:20 degrees."},
    ]
    second = scripted.responses.create(model="scripted", input=items, tools=TOOLS)
    assert second.output_text == "20 degrees."


def test_the_events_of_a_stream(scripted: OpenAI) -> None:
    events = list(create(scripted, "Hello, world!", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "Hello, world!"


def test_the_sdks_own_accumulation(scripted: OpenAI) -> None:
    answer = f"{THOUGHT}Let me see.\n{WEATHER}"
    with scripted.responses.stream(model="scripted", input=f"SAY:{answer}", tools=TOOLS) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "Let me see."
    call = final.output[-1]
    assert call.type == "function_call"
    assert call.parsed_arguments == json.loads(COLOGNE)


def test_a_stream_that_is_cut(scripted: OpenAI) -> None:
    events = list(create(scripted, "Hello, world!", stream=True, max_output_tokens=5))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "name": "get_weather"}])
def test_forced_calls(scripted: OpenAI, tool_choice: Any) -> None:
    said = f'[{{"name": "get_weather", "parameters": {COLOGNE}}}]' if tool_choice == "required" else COLOGNE
    response = create(scripted, said, tools=TOOLS, tool_choice=tool_choice)
    assert [(item.name, item.arguments) for item in response.output] == [("get_weather", COLOGNE)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_is_not_served_is_named(scripted: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(scripted, "x", **fields)
    assert refused.value.param == param


def test_an_unknown_model(scripted: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        scripted.responses.create(model="other", input="SAY:x")
