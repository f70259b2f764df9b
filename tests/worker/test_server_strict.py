"""Functions with `strict: true`, called or not as the model likes: what the answer may look like then."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.worker import chat_templates
from tests.worker.talking import ASK, CALL, COLOGNE, NOW, WEATHER, chat, engine_of, plain_calls, post, worker
from worker.grammar.checker import byte_tokenizer
from worker.grammar.compiling import STACK_BYTES, compile_matcher
from worker.params import StructuredOutputs

FUNCTION: Any = WEATHER["function"]
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
TOOLS = [STRICT, NOW]


def allows(form: StructuredOutputs, text: str) -> tuple[bool, bool]:
    """Whether an answer may begin with `text`, and whether it may be that."""
    found: list[tuple[bool, bool]] = []

    def work() -> None:
        matcher = compile_matcher(byte_tokenizer(), form)
        tokens = list(text.encode())
        found.append((matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()))

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found[0]


async def form_of(template: str = chat_templates.QWEN25, **fields: Any) -> StructuredOutputs | None:
    state = worker(CALL, template)
    body = await chat(state, tools=TOOLS, **fields)
    assert plain_calls(body["choices"][0]["message"]) == [("get_weather", COLOGNE)]
    return engine_of(state).submitted[0].params.structured_outputs


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_arguments_keep_to_the_schema_once_a_call_has_begun() -> None:
    form = await form_of()
    assert form is not None
    for text in (
        "It is <b>5</b> degrees.",
        call("get_weather", COLOGNE),
        "\n".join(("Let me see.", call("get_weather", COLOGNE), call("now", '{"any": [1]}'), "Done.")),
    ):
        assert allows(form, text) == (True, True), text
    for text in (
        call("get_weather", '{"city": 5}'),
        call("get_weather", "{}"),
        call("get_weather", '{"city": "Köln", "other": 1}'),
        call("now", "[]"),
        call("other", "{}"),
        "<tool_call>What?",
    ):
        assert allows(form, text)[0] is False, text
    assert allows(form, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K') == (True, False)


async def test_reasoning_stays_free() -> None:
    form = await form_of(chat_templates.QWEN3)
    assert form is not None
    assert form.thinking == "may"
    assert allows(form, f"<think>\n<tool_call>?\n</think>\n\n{call('now', '{}')}") == (True, True)
    assert allows(form, f"<think>\n<tool_call>?\n</think>\n\n{call('now', '5')}")[0] is False


async def test_what_asks_for_a_form_counts_instead() -> None:
    form = await form_of(response_format={"type": "json_object"})
    assert form == StructuredOutputs(json_object=True)
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    state = worker(COLOGNE, chat_templates.QWEN25)
    await chat(state, tools=TOOLS, tool_choice=chosen)
    forced = engine_of(state).submitted[0].params.structured_outputs
    assert forced is not None
    assert forced.json is not None


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        (chat_templates.QWEN25, {"tools": [WEATHER, NOW]}),
        (chat_templates.QWEN25, {"tools": TOOLS, "tool_choice": "none"}),
        (chat_templates.LLAMA, {"tools": TOOLS}),
    ],
)
async def test_without_strict_functions_or_marks_around_calls_answers_are_free(
    template: str, fields: dict[str, Any]
) -> None:
    state = worker("Hm.", template)
    await chat(state, **fields)
    assert engine_of(state).submitted[0].params.structured_outputs is None


async def test_schemas_that_are_too_long_together_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 70_000}}}
    tool["function"]["strict"] = True  # type: ignore[index]
    answer = await post(worker(CALL, chat_templates.QWEN25), messages=ASK, tools=[tool])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
