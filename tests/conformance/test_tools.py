"""Tool calls as OpenAI's SDK reads them, through gateway and worker."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.conformance.conftest import MODEL

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "What time is it?"}},
]
COLOGNE = '{"city": "Köln", "days": 2}'
WEATHER = f'<tool_call>\n{{"name": "get_weather", "arguments": {COLOGNE}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def ask(answer: str, *before: dict[str, Any]) -> Any:
    """Messages that make the model answer so."""
    return [*before, {"role": "user", "content": f"SAY:{answer}"}]


def create(client: OpenAI, answer: str, **fields: Any) -> ChatCompletion:
    api: Any = client.chat.completions
    made: ChatCompletion = api.create(model="scripted", messages=ask(answer), **{"tools": TOOLS, **fields})
    return made


def calls_of(answer: ChatCompletion) -> list[tuple[str, str]]:
    calls = answer.choices[0].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]


def test_a_call(scripted: OpenAI) -> None:
    answer = create(scripted, WEATHER)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert calls_of(answer) == [("get_weather", COLOGNE)]


def test_calls_beside_text(scripted: OpenAI) -> None:
    answer = create(scripted, f"Let me see.\n{WEATHER}\n{NOW}")
    assert answer.choices[0].message.content == "Let me see."
    assert calls_of(answer) == [("get_weather", COLOGNE), ("now", "{}")]
    ids = {call.id for call in answer.choices[0].message.tool_calls or ()}
    assert len(ids) == 2


def test_no_call(scripted: OpenAI) -> None:
    answer = create(scripted, "It is five.")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is five.", "stop")
    assert answer.choices[0].message.tool_calls is None


def test_one_call_only(scripted: OpenAI) -> None:
    assert calls_of(create(scripted, f"{NOW}\n{WEATHER}", parallel_tool_calls=False)) == [("now", "{}")]


def test_tools_that_may_not_be_used(scripted: OpenAI) -> None:
    answer = create(scripted, NOW, tool_choice="none")
    assert answer.choices[0].message.content == NOW


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_forced_calls(scripted: OpenAI, tool_choice: Any) -> None:
    said = f'[{{"name": "get_weather", "parameters": {COLOGNE}}}]' if tool_choice == "required" else COLOGNE
    answer = create(scripted, said, tool_choice=tool_choice)
    assert calls_of(answer) == [("get_weather", COLOGNE)]
    assert answer.choices[0].finish_reason == ("tool_calls" if tool_choice == "required" else "stop")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(scripted: OpenAI, mode: str) -> None:
    said = WEATHER if mode == "auto" else f'[{{"name": "get_weather", "parameters": {COLOGNE}}}]'
    listed = [{"type": "function", "function": {"name": "get_weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
    answer = create(scripted, said, tool_choice=choice)
    assert calls_of(answer) == [("get_weather", COLOGNE)]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_deltas_of_a_stream(scripted: OpenAI) -> None:
    stream = scripted.chat.completions.create(
        model="scripted", messages=ask(f"Hm.\n{WEATHER}\n{NOW}"), tools=TOOLS, stream=True
    )
    content, reason = "", None
    calls: list[list[str]] = []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert call.function
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                calls.append([call.function.name or "", ""])
            else:
                assert (call.type, call.function.name) == (None, None)
                calls[call.index][1] += call.function.arguments or ""
    assert (content, reason) == ("Hm.", "tool_calls")
    assert calls == [["get_weather", COLOGNE], ["now", "{}"]]


def test_the_sdks_own_accumulation(scripted: OpenAI) -> None:
    with scripted.chat.completions.stream(
        model="scripted", messages=ask(f"Hm.\n{WEATHER}"), tools=TOOLS
    ) as stream:
        events = list(stream)
        answer = stream.get_final_completion()
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == ("get_weather", json.loads(COLOGNE))
    assert answer.choices[0].message.content == "Hm."


def test_a_conversation_with_results(scripted: OpenAI) -> None:
    first = create(scripted, WEATHER)
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "SAY:20 degrees"}
    history: Any = [*ask("nothing"), message.model_dump(exclude_none=True), result]
    answer = scripted.chat.completions.create(model="scripted", messages=history, tools=TOOLS)
    # The template ends the tool's message with its own mark.
    assert answer.choices[0].message.content == "20 degrees\n</tool_response>"


def test_parsed_arguments(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.parse(model="scripted", messages=ask(WEATHER), tools=TOOLS[:1])
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.parsed_arguments == json.loads(COLOGNE)


FORCED: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a_real_model_calls_what_it_must(client: OpenAI, stream: bool) -> None:
    api: Any = client.chat.completions
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [FORCED, TOOLS[1]],
        "tool_choice": "required" if stream else {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "max_tokens": 150,
        "seed": 1,
    }
    if stream:
        with api.stream(**asked) as chunks:
            answer = chunks.get_final_completion()
    else:
        answer = api.create(**asked)
    assert answer.choices[0].finish_reason == ("tool_calls" if stream else "stop")
    ((name, arguments),) = calls_of(answer)
    schemas = {"get_weather": FORCED["function"]["parameters"], "now": {"additionalProperties": False}}
    jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(scripted: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(scripted, "x", **fields)
    assert refused.value.param == param
