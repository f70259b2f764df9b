"""Reasoning in POST /v1/chat/completions, against an engine that says what the test wants."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker import chat_templates
from tests.worker.talking import (
    CALL,
    COLOGNE,
    NOW_CALL,
    TOOLS,
    chat,
    engine_of,
    joined,
    plain_calls,
    prompt_of,
    stream,
    worker,
)

THOUGHT = "<think>\nWarm?\nMaybe.\n</think>\n\nIt is."


@pytest.mark.parametrize("per_step", [1, 4, 1000])
async def test_reasoning_is_apart_from_the_answer(per_step: int) -> None:
    body = await chat(worker(THOUGHT, per_step=per_step))
    message = body["choices"][0]["message"]
    assert message["content"] == "It is."
    assert message["reasoning_content"] == message["reasoning"] == "Warm?\nMaybe."
    chunks = await stream(worker(THOUGHT, per_step=per_step), stream_options={"include_usage": True})
    message, reason = joined(chunks)
    assert (message["content"], message["reasoning"], reason) == ("It is.", "Warm?\nMaybe.", "stop")
    assert message["reasoning_content"] == message["reasoning"]
    if per_step == 1:
        reasoning = len("<think>\nWarm?\nMaybe.\n</think>")
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoning}
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoning}


async def test_reasoning_that_the_prompt_opens() -> None:
    body = await chat(worker("Warm?\n</think>It is.", chat_templates.R1))
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("It is.", "Warm?")


async def test_thinking_can_be_switched_off() -> None:
    state = worker("It is.")
    body = await chat(state, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(state).endswith("<think>\n\n</think>\n\n")
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("It is.", None)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_can_be_left_out() -> None:
    body = await chat(worker(THOUGHT), include_reasoning=False)
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("It is.", None)
    message, _ = joined(await stream(worker(THOUGHT), include_reasoning=False))
    assert message == {"content": "It is.", "tool_calls": []}


async def test_reasoning_that_max_tokens_cuts() -> None:
    body = await chat(worker(THOUGHT), max_tokens=len("<think>\nWarm"))
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Warm")
    assert choice["finish_reason"] == "length"


async def test_calls_within_reasoning_are_none() -> None:
    answer = f"<think>\nShould I {NOW_CALL}?\n</think>\n\n{CALL}"
    message, reason = joined(await stream(worker(answer), tools=TOOLS))
    assert (plain_calls(message), reason) == ([("get_weather", COLOGNE)], "tool_calls")
    assert message["reasoning"] == f"Should I {NOW_CALL}?"


async def test_log_probabilities_are_those_of_all_tokens() -> None:
    answer = f"<think>a</think>Is{CALL}"
    body = await chat(worker(answer), tools=TOOLS, logprobs=True)
    tokens = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == answer
    chunks = await stream(worker(answer, per_step=3), tools=TOOLS, logprobs=True)
    streamed = [
        byte
        for chunk in chunks
        for choice in chunk["choices"]
        for token in (choice["logprobs"] or {}).get("content", ())
        for byte in token["bytes"]
    ]
    assert bytes(streamed).decode() == answer


@pytest.mark.parametrize(
    ("template", "fields", "thinking"),
    [
        (chat_templates.QWEN3, {}, "may"),
        (chat_templates.QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, "no"),
        (chat_templates.QWEN25, {}, "no"),
    ],
)
async def test_the_form_of_a_forced_call_begins_after_the_reasoning(
    template: str, fields: dict[str, Any], thinking: str
) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    said = f"<think>\nHm.\n</think>\n\n{COLOGNE}" if thinking == "may" else COLOGNE
    state = worker(said, template)
    body = await chat(state, tools=TOOLS, tool_choice=choice, **fields)
    assert plain_calls(body["choices"][0]["message"]) == [("get_weather", COLOGNE)]
    form = engine_of(state).submitted[0].params.structured_outputs
    assert form is not None
    assert form.thinking == thinking
