"""Reasoning beside the answer, through gateway and worker."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.conformance.test_tools import COLOGNE, TOOLS, WEATHER, ask, calls_of

THOUGHT = "<think>\nIs it five?\n\nYes, naïvely 🙂.\n</think>\n\n"
REASONING = "Is it five?\n\nYes, naïvely 🙂."


def test_a_whole_answer(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.create(model="scripted", messages=ask(f"{THOUGHT}Five."))
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Five.", REASONING, REASONING)
    details = answer.usage and answer.usage.completion_tokens_details
    assert details
    assert 0 < (details.reasoning_tokens or 0) < (answer.usage.completion_tokens if answer.usage else 0)


def test_a_stream(scripted: OpenAI) -> None:
    stream = scripted.chat.completions.create(
        model="scripted",
        messages=ask(f"{THOUGHT}Five."),
        stream=True,
        stream_options={"include_usage": True},
    )
    content = reasoning = ""
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta: Any = choice.delta
            assert not (content and getattr(delta, "reasoning", None)), "reasoning comes first"
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
    assert (content, reasoning) == ("Five.", REASONING)
    assert usage
    assert usage.completion_tokens_details
    assert usage.completion_tokens_details.reasoning_tokens


def test_calls_after_reasoning(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.create(model="scripted", messages=ask(THOUGHT + WEATHER), tools=TOOLS)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning) == (None, REASONING)
    assert calls_of(answer) == [("get_weather", COLOGNE)]


def test_without_reasoning(scripted: OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = scripted.chat.completions.create(model="scripted", messages=ask("Five."), extra_body=extra)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning) == ("Five.", None)


def test_reasoning_that_nobody_wants(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.create(
        model="scripted", messages=ask(f"{THOUGHT}Five."), extra_body={"include_reasoning": False}
    )
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning) == ("Five.", None)


def test_an_answer_that_is_cut_while_it_thinks(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.create(
        model="scripted", messages=ask(f"{THOUGHT}Five."), max_tokens=19
    )
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning) == (None, "Is it five?")
    assert answer.choices[0].finish_reason == "length"
