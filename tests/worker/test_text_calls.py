"""Calls that aren't JSON through and through: Qwen3-Coder's, Mistral's from v11 on, and Python's."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.test_text_tools import a_call, plain, read
from worker.text.answer import CALL_END, CallArguments, CallStart, Content, Part
from worker.text.calls import CALL_FORMATS, CallFormat, MarkedCalls

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "opts": {"type": "object"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"enum": ["s", "l"]},
        }
    },
    "now": {},
    "f": {},
}
CODER, MISTRAL, PYTHONIC = (CALL_FORMATS[name] for name in ("qwen3_coder", "mistral", "llama4_pythonic"))


def coded(function: str, **values: str) -> str:
    given = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function={function}>\n{given}</function>\n</tool_call>"


def weather(**values: str) -> str:
    return coded("get_weather", **values)


C = weather(city='Köln "am\n\nRhein"', days="2")
AT = '{"city": "Köln \\"am\\n\\nRhein\\"", "days": 2}'
JSON_CALL = '<tool_call>\n{"name": "now"}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (C, a_call("get_weather", AT)),
        (f"Let me see.\n\n{C}\n{C}\n", [Content("Let me see."), *a_call("get_weather", AT) * 2]),
        (C.removeprefix("<tool_call>\n"), a_call("get_weather", AT)),
        (C.replace("</parameter>\n", ""), a_call("get_weather", AT)),
        (coded("now"), a_call("now", "{}")),
        (weather(opts='{"a": [1, true]}'), a_call("get_weather", '{"opts": {"a": [1, true]}}')),
        (weather(opts="{'a': None}"), a_call("get_weather", '{"opts": {"a": null}}')),
        (weather(days="soon"), a_call("get_weather", '{"days": "soon"}')),
        (weather(unit="null"), a_call("get_weather", '{"unit": null}')),
        (weather(unit="5"), a_call("get_weather", '{"unit": "5"}')),
        (weather(size="5", other="6"), a_call("get_weather", '{"size": "5", "other": "6"}')),
        (weather(city="\n"), a_call("get_weather", '{"city": "\\n"}')),
        (weather(city=""), a_call("get_weather", '{"city": ""}')),
        (weather(city="</parameter"), a_call("get_weather", '{"city": "</parameter"}')),
        (C[:60], [CallStart("get_weather"), CallArguments('{"city": "Köln \\"am')]),
        (JSON_CALL, plain(JSON_CALL)),
        ("a <function= b", plain("a <function= b")),
        ("<tool_call><function=a b>", plain("<tool_call><function=a b>")),
    ],
)
def test_parameters_between_marks(text: str, parts: list[Part]) -> None:
    check(CODER, text, parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            '[TOOL_CALLS]get_weather[ARGS]{"city": "K"}[TOOL_CALLS]now[ARGS]{}',
            [*a_call("get_weather", '{"city": "K"}'), *a_call("now", "{}")],
        ),
        ("[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}", a_call("now", "{}")),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', a_call("now", "{}")),
        (
            'Hm. [TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}',
            [Content("Hm."), *a_call("f", '{"a": "[TOOL_CALLS]"}')],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a', [CallStart("f"), CallArguments('{"a')]),
        ("[TOOL_CALLS]f[ARGS] no", plain("[TOOL_CALLS]f[ARGS] no")),
        ("[TOOL_CALLS] what?", plain("[TOOL_CALLS] what?")),
    ],
)
def test_a_name_before_its_arguments(text: str, parts: list[Part]) -> None:
    check(MISTRAL, text, parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[now()]", a_call("now", "{}")),
        (
            "[get_weather(city='it\\'s (x), 1', opts={\"a\": [1, None]}, ok=true), now()]",
            [
                *a_call("get_weather", '{"city": "it\'s (x), 1", "opts": {"a": [1, null]}, "ok": true}'),
                *a_call("now", "{}"),
            ],
        ),
        ("<|python_start|>[now()]<|python_end|>", a_call("now", "{}")),
        ("[now()]\nThere.", [*a_call("now", "{}"), Content("\nThere.")]),
        ('[f(days=1, city="Kö', [CallStart("f"), CallArguments('{"days": 1, "city": ')]),
        ("[other(a=1)]", plain("[other(a=1)]")),
        ("[1, 2]", plain("[1, 2]")),
        ("See [now()]", plain("See [now()]")),
        ("<|python_start|>[f(a=__import__('os'))]", a_call("f", '{"a": "__import__(\'os\')"}')),
    ],
)
def test_calls_of_python(text: str, parts: list[Part]) -> None:
    check(PYTHONIC, text, parts)


def check(format: CallFormat, text: str, parts: list[Part]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(MarkedCalls(format, SCHEMAS), pieces) == parts, size


def test_text_is_passed_on_while_it_comes() -> None:
    reader = MarkedCalls(CODER, SCHEMAS)
    reader.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln am ")
    assert reader.push("Rhein") == [CallArguments("Rhein")]
    reader = MarkedCalls(MISTRAL, SCHEMAS)
    reader.push('[TOOL_CALLS]get_weather[ARGS]{"city": "Köln am ')
    assert reader.push("Rhein") == [CallArguments("Rhein")]


KEYS = st.sampled_from(["city", "days", "a_b", "x1"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["), f(", "', \"", "]["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(arguments=st.dictionaries(KEYS, VALUES, max_size=3), size=st.integers(1, 9))
def test_values_come_out_as_they_went_in(arguments: dict[str, Any], size: int) -> None:
    python = f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    for format, text in (
        (PYTHONIC, python),
        (MISTRAL, f"[TOOL_CALLS]f[ARGS]{json.dumps(arguments)}"),
        (CODER, coded("f", **{key: str(value) for key, value in arguments.items()})),
    ):
        schemas = {"f": {"properties": {key: {"type": kind_of(value)} for key, value in arguments.items()}}}
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        start, given, end = read(MarkedCalls(format, schemas), pieces)
        assert (start, end) == (CallStart("f"), CALL_END)
        assert isinstance(given, CallArguments)
        assert json.loads(given.text) == arguments


def kind_of(value: object) -> str:
    return {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}.get(
        type(value), "null"
    )


WORDS = [
    "<tool_call>", "</tool_call>", "<function=now>", "<function=", "</function>", "<parameter=city>",
    "</parameter>", "\n", " ", "x", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "get_weather", "{", "}",
    '"', "'", "\\", "[", "]", "(", ")", ",", "=", "days", "5", "<|python_start|>", "<|python_end|>",
]  # fmt: skip


@given(
    words=st.lists(st.sampled_from(WORDS), max_size=25),
    size=st.integers(1, 9),
    format=st.sampled_from([CODER, MISTRAL, PYTHONIC]),
)
def test_whatever_is_written_is_read_the_same_however_it_is_cut(
    words: list[str], size: int, format: CallFormat
) -> None:
    text = "".join(words)
    whole = read(MarkedCalls(format, SCHEMAS), [text])
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(MarkedCalls(format, SCHEMAS), pieces) == whole
    for part, after in itertools.pairwise(whole):
        if isinstance(part, CallArguments) and after == CALL_END and format is not MISTRAL:
            assert isinstance(json.loads(part.text), dict)
