"""Calls and reasoning in a model's text: the same parts however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.answer import (
    CALL_END,
    AnswerReader,
    CallArguments,
    CallStart,
    Content,
    Part,
    Reader,
    Reasoning,
    joined,
)
from worker.text.calls import CALL_FORMATS, CallFormat, MarkedCalls, call_format_of
from worker.text.calls.forced import LIST_OF_CALLS, NamedCall
from worker.text.reasoning import (
    REASONING_FORMATS,
    ReasoningTokens,
    ThinkReader,
    ThinkState,
    reasoning_format_of,
)

NAMES = ("f", "get_weather", "now")
HERMES, LLAMA, PHI, MISTRAL = (
    CALL_FORMATS[name] for name in ("hermes", "llama3_json", "phi4_mini_json", "mistral")
)
WEATHER = '{"city": "Köln", "days": 2}'


def read(reader: Reader, pieces: list[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return joined([*parts, *reader.finish()])


def calls(format: CallFormat, text: str) -> list[Part]:
    """The parts of `text`, which are the same in one piece and character by character."""
    whole = read(MarkedCalls(format, NAMES), [text])
    assert read(MarkedCalls(format, NAMES), list(text)) == whole
    return whole


def a_call(name: str = "get_weather", arguments: str = WEATHER) -> list[Part]:
    return [CallStart(name), CallArguments(arguments), CALL_END]


def plain(text: str) -> list[Part]:
    return [Content(text)]


H = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("format", "text", "parts"),
    [
        (HERMES, H, a_call()),
        (HERMES, f"Let me see.\n\n{H}\n", [Content("Let me see."), *a_call()]),
        (HERMES, f"{H}\n{H}", a_call() * 2),
        (HERMES, f"{H}\nThat was it.", [*a_call(), Content("\nThat was it.")]),
        (HERMES, '<tool_call>{"name":"now","arguments":{}}</tool_call>', a_call("now", "{}")),
        (HERMES, '<tool_call>{"name":"now"}</tool_call>', a_call("now", "{}")),
        (HERMES, '<tool_call>{"name":"now","arguments":null}</tool_call>', a_call("now", "{}")),
        (HERMES, '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', a_call("f", '{"a": [1]}')),
        (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', a_call("f", '{"a": 1}')),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', a_call("f", '{"a":1}')),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":1}}}</tool_call>', a_call("f", '{"a":1}')),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":1},"id":"x"}</tool_call>', a_call("f", '{"a":1}')),
        (
            HERMES,
            '<tool_call>{"name":"f","arguments":{"a":"}{\\"</tool_call>"}}</tool_call>',
            a_call("f", '{"a":"}{\\"</tool_call>"}'),
        ),
        (
            LLAMA,
            f'{{"name": "get_weather", "parameters": {WEATHER}}}',
            a_call(),
        ),
        (LLAMA, f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', a_call()),
        (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', a_call("f", '{"a": 1}')),
        (
            LLAMA,
            '{"name": "f", "parameters": {}}; {"name": "now", "parameters": {"b": ";"}}',
            [*a_call("f", "{}"), *a_call("now", '{"b": ";"}')],
        ),
        (
            PHI,
            '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, '
            '{"name": "now", "arguments": {}}]<|/tool_call|>',
            [*a_call("f", '{"a": 1}'), *a_call("now", "{}")],
        ),
        (PHI, 'functools[{"name": "f", "arguments": {"a": 1}}]', a_call("f", '{"a": 1}')),
        (
            PHI,
            '<|tool_call|>[{"type": "function", '
            '"function": {"name": "f", "arguments": {"a": 1}}}]<|/tool_call|>',
            a_call("f", '{"a": 1}'),
        ),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
            [*a_call("f", '{"a": 1}'), *a_call("now", "{}")],
        ),
    ],
)
def test_calls(format: CallFormat, text: str, parts: list[Part]) -> None:
    assert calls(format, text) == parts


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "Hello <b>there</b>, it is < 5 \n"),
        (HERMES, "<tool_call> is how a call begins"),
        (HERMES, '<tool_call>{"name": "f"</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"city": "Rome"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "argum'),
        (HERMES, "<tool_c"),
        (HERMES, "\n\n"),
        (LLAMA, '{"name": "Bob", "parameters": {"age": 3}}'),
        (LLAMA, '{"answer": {"name": "f", "parameters": {}}}'),
        (LLAMA, '{"name": "f"}'),
        (LLAMA, 'The call is {"name": "f", "parameters": {}}'),
        (LLAMA, "<|python_tag|>print(1)"),
        (PHI, "functools are tools for functions"),
        (PHI, "<|tool_call|>[]<|/tool_call|>"),
        (MISTRAL, "[TOOL_CALLS] nothing"),
    ],
)
def test_what_is_no_call_is_content_as_it_came(format: CallFormat, text: str) -> None:
    assert calls(format, text) == plain(text)


def test_a_good_call_after_a_broken_one_is_found() -> None:
    broken = '<tool_call>{"name": "f", "arguments": \n</tool_call>'
    assert calls(HERMES, broken + "\n" + H) == [Content(broken), *a_call()]
    assert calls(HERMES, '<tool_call>{"name": "f", ' + H) == [Content('<tool_call>{"name": "f",'), *a_call()]


def test_a_call_that_was_cut_has_no_end() -> None:
    whole = '<tool_call>{"name":"f","arguments":{"a":"b c"}}'
    assert calls(HERMES, whole[:-5]) == [CallStart("f"), CallArguments('{"a":"b')]
    assert calls(HERMES, whole) == a_call("f", '{"a":"b c"}')
    assert calls(HERMES, whole + "\n</tool") == a_call("f", '{"a":"b c"}')


def test_arguments_that_are_no_json_end_where_the_mark_is() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a":"unclosed}}\n</tool_call>\nBye'
    assert calls(HERMES, text) == [
        CallStart("f"), CallArguments('{"a":"unclosed}}'), Content("\nBye"),
    ]  # fmt: skip


def test_arguments_come_while_they_are_written() -> None:
    reader = MarkedCalls(HERMES, NAMES)
    seen = reader.push('<tool_call>\n{"name": "f", "arguments": {"text": "once upon')
    assert seen == [CallStart("f"), CallArguments('{"text": "once upon')]
    assert reader.push(" a time") == [CallArguments(" a time")]
    assert joined(reader.push('"}}\n</tool_call>')) == [CallArguments('"}'), CALL_END]


def test_content_comes_while_it_is_written() -> None:
    reader = MarkedCalls(HERMES, NAMES)
    assert reader.push("One two") == plain("One two")
    assert reader.push(" <") == []
    assert joined(reader.push("b> three")) == plain(" <b> three")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "}]", ";"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
made_calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
WRITERS: dict[str, Any] = {
    "hermes": lambda made: "\n".join(
        "<tool_call>\n" + json.dumps({"name": n, "arguments": a}) + "\n</tool_call>" for n, a in made
    ),
    "llama3_json": lambda made: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in made),
    "phi4_mini_json": lambda made: (
        "<|tool_call|>" + json.dumps([{"name": n, "arguments": a} for n, a in made]) + "<|/tool_call|>"
    ),
    "mistral": lambda made: "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in made]),
    "required": lambda made: json.dumps([{"name": n, "parameters": a} for n, a in made], indent=1),
}


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


AS_JSON = [LIST_OF_CALLS, *(CALL_FORMATS[name] for name in WRITERS if name in CALL_FORMATS)]


@given(st.data(), st.sampled_from(AS_JSON), made_calls)
def test_any_calls_come_out_as_they_went_in(
    data: st.DataObject, format: CallFormat, made: list[tuple[str, dict[str, Any]]]
) -> None:
    pieces = data.draw(cut(WRITERS[format.name](made)))
    parts = read(MarkedCalls(format, NAMES), pieces)
    assert [part.name for part in parts if isinstance(part, CallStart)] == [name for name, _ in made]
    given = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert given == [arguments for _, arguments in made]
    assert len(parts) == 3 * len(made)


SHREDS = (
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "functools", "[TOOL_CALLS]",
    "<|python_tag|>", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {"a": 1}}',
    '{"name": "zz", "parameters": {}}', '"name"', '"arguments": ', "{", "}", "[", "]", ",", ";", '"', "\\",
    "\n", " ", "a", "<", "<think>", "</think>", "é",
)  # fmt: skip
wild_text = st.lists(st.sampled_from(SHREDS), max_size=14).map("".join)


@given(st.data(), st.sampled_from([*CALL_FORMATS.values(), LIST_OF_CALLS]), wild_text)
def test_the_parts_of_any_text_do_not_depend_on_how_it_is_cut(
    data: st.DataObject, format: CallFormat, text: str
) -> None:
    whole = read(MarkedCalls(format, NAMES), [text])
    assert read(MarkedCalls(format, NAMES), data.draw(cut(text))) == whole
    assert read(MarkedCalls(format, NAMES), list(text)) == whole
    if not any(isinstance(part, CallStart) for part in whole):
        assert whole == joined([Content(text)])


@given(st.data(), wild_text, st.sampled_from(["undecided", "inside", "after"]))
def test_reasoning_with_calls_does_not_depend_on_how_it_is_cut(
    data: st.DataObject, text: str, state: ThinkState
) -> None:
    def reader() -> AnswerReader:
        return AnswerReader(ThinkReader(state), MarkedCalls(HERMES, NAMES), 1)

    whole = read(reader(), [text])
    assert read(reader(), data.draw(cut(text))) == whole
    assert read(reader(), list(text)) == whole
    assert sum(isinstance(part, CallStart) for part in whole) <= 1


@given(st.data(), wild_text)
def test_a_named_call_does_not_depend_on_how_it_is_cut(data: st.DataObject, text: str) -> None:
    whole = read(NamedCall("f"), [text])
    assert read(NamedCall("f"), data.draw(cut(text))) == whole


def test_a_named_call_is_the_whole_answer() -> None:
    assert read(NamedCall("f"), [' {"a": ', '{"b": 1}}\n']) == a_call("f", '{"a": {"b": 1}}')
    assert read(NamedCall("f"), ['{"a": ']) == [CallStart("f"), CallArguments('{"a": ')]


@pytest.mark.parametrize(
    ("state", "text", "parts"),
    [
        ("undecided", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("undecided", "\n<think>Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("undecided", "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        ("undecided", "Yes. <think>no</think>", [Content("Yes. <think>no</think>")]),
        ("undecided", " <thinner", [Content(" <thinner")]),
        ("undecided", "<think>\nHm", [Reasoning("Hm")]),
        ("inside", "\nHm.\n\nHm!\n</think>\n\nYes.", [Reasoning("Hm.\n\nHm!"), Content("Yes.")]),
        ("inside", "<think>\nHm.\n</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("inside", "Hm </thi", [Reasoning("Hm </thi")]),
        ("after", "<think>Yes.</think>", [Content("<think>Yes.</think>")]),
    ],
)
def test_reasoning(state: ThinkState, text: str, parts: list[Part]) -> None:
    assert read(ThinkReader(state), [text]) == parts
    assert read(ThinkReader(state), list(text)) == parts


def test_where_the_answer_begins_shows_in_the_prompt() -> None:
    qwen, r1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]
    assert qwen.first_state("<|im_start|>assistant\n") == "undecided"
    assert qwen.first_state("<|im_start|>assistant\n<think>\n") == "inside"
    assert qwen.first_state("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "after"
    assert r1.first_state("<｜Assistant｜>") == "inside"


@pytest.mark.parametrize("size", [1, 2, 5, 50])
def test_reasoning_tokens_are_counted_to_the_closing_mark(size: int) -> None:
    open_, close = 1000, 1001
    tokens = [open_, 5, 6, close, 7, 8]
    counted = ReasoningTokens("undecided", open_, close)
    for start in range(0, len(tokens), size):
        counted.push(tokens[start : start + size], "undecided")
    assert counted.count == 4
    inside = ReasoningTokens("inside", open_, close)
    inside.push([5, 6], "inside")
    inside.push([close, 7], "after")
    inside.push([8], "after")
    assert inside.count == 3


def test_reasoning_tokens_without_tokens_for_the_marks_go_by_the_text() -> None:
    reader, counted = ThinkReader("undecided"), ReasoningTokens("undecided", None, None)
    for character in "<think>ab</think>cd":
        reader.push(character)
        counted.push([0], reader.state)
    assert counted.count == len("<think>ab</think>")


def test_calls_beyond_the_most_are_left_out() -> None:
    reader = AnswerReader(None, MarkedCalls(HERMES, NAMES), 1)
    assert read(reader, [f"{H}\n{H}"]) == a_call()
    assert reader.called


def test_a_cut_call_is_no_whole_call() -> None:
    reader = AnswerReader(None, MarkedCalls(HERMES, NAMES))
    read(reader, ['<tool_call>{"name": "f", "arguments": {"a'])
    assert not reader.called


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ('…<tool_call>\n{"name": <function-name>…</think>', "hermes", "qwen3"),
        ("<tool_call>\n<function=example>", "qwen3_coder", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral", None),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2)]", "llama4_pythonic", None),
        ('<|python_start|> … Respond in the format {"name": function name, …', "llama3_json", None),
        ("{{ '<|python_tag|>' + message }}", "llama3_json", None),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json", None),
        ("{{ '[TOOL_CALLS]' }}", "mistral", None),
        ("<｜User｜>…<｜Assistant｜><think>\n…</think>", None, "deepseek_r1"),
        ("{{ '<|im_start|>' }}", None, None),
    ],
)
def test_formats_are_known_by_the_template(template: str, calls: str | None, reasoning: str | None) -> None:
    found = call_format_of(template)
    assert (found.name if found else None) == calls
    thinks = reasoning_format_of(template)
    assert (thinks.name if thinks else None) == reasoning
