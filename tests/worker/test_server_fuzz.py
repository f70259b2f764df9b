"""Whatever JSON a client sends: an answer or an error of the one shape, never a failure of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.chat_templates import QWEN3, text_side
from tests.worker.fake_engine import (
    INFO,
    MODEL,
    POOLING_INFO,
    FakeEngine,
    in_process,
    make_state,
    say,
    strict_json,
)
from worker.server.responses_input import ResponsesRequest
from worker.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    TokenizeRequest,
)
from worker.server.text_model import TextModel

ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Hi"}),
    "/generate": (GenerateRequest, {"prompt": "Hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [72]}),
}
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 20, 128, 255, 256, 257, 258, 512, 2**31, 2**63, -(2**63), 2**64, 10**30]),
    st.sampled_from([0.0, 1e-300, 1e-6, 1e-5, 0.5, 1.0, 2.0, 1e38, 1e300, -2.0]),
    st.integers(-5, 300),
)
TEXT = st.one_of(
    st.text(max_size=8), st.sampled_from(["assistant", "text", "json_object", "\x00", "a" * 2000])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(TEXT, NUMBERS.map(str)), inner, max_size=4),
    ),
    max_leaves=6,
)
MANY = st.builds(lambda item, count: [item] * count, SCALARS, st.sampled_from([16, 17, 256, 257, 1024, 1025]))
VALUES = st.one_of(NESTED, MANY)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "nobody"])},
        optional={"content": VALUES, "name": SCALARS, "tool_calls": VALUES, "tool_call_id": SCALARS},
    ),
    max_size=3,
)


FUNCTION_FIELDS = {
    "description": SCALARS,
    "strict": SCALARS,
    "parameters": st.one_of(
        NESTED,
        st.fixed_dictionaries({"type": st.just("object")}, optional={"properties": NESTED, "$defs": NESTED}),
    ),
}
NAMES = st.sampled_from(["f", "g", "h", "a b"])
FUNCTIONS = st.one_of(
    st.fixed_dictionaries({"name": NAMES}),
    st.fixed_dictionaries({"name": NAMES}, optional=FUNCTION_FIELDS),
)
KINDS = st.sampled_from(["function"] * 5 + ["web_search"])
TOOL_CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required", "always"]),
    st.sampled_from([{"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}]),
    NESTED,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "text", "input_image"]), "text": TEXT}
    ),
    max_size=2,
)
ITEM = {
    "message": {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.one_of(TEXT, PARTS)},
    "function_call": {"name": TEXT, "call_id": TEXT, "arguments": st.sampled_from(["{}", "[]", "{", ""])},
    "function_call_output": {"call_id": TEXT, "output": st.one_of(TEXT, PARTS)},
    "reasoning": {"content": st.lists(st.just({"type": "reasoning_text", "text": "Hm."}), max_size=2)},
    "item_reference": {},
}
ITEMS = st.lists(
    st.sampled_from(sorted(ITEM)).flatmap(
        lambda kind: st.fixed_dictionaries({"type": st.just(kind), **ITEM[kind]}, optional={"id": TEXT})
    ),
    max_size=4,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXT}, optional={"arguments": TEXT})},
        optional={"id": TEXT, "type": KINDS},
    ),
    max_size=2,
)
TOOL_MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}),
        st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": TEXT}),
        st.fixed_dictionaries(
            {"role": st.just("assistant")}, optional={"content": TEXT, "tool_calls": CALLS, "reasoning": TEXT}
        ),
    ),
    min_size=1,
    max_size=4,
)
WITH_TOOLS = {
    "/v1/chat/completions": st.fixed_dictionaries(
        {
            "messages": TOOL_MESSAGES,
            "tools": st.lists(st.fixed_dictionaries({"type": KINDS, "function": FUNCTIONS}), max_size=2),
        },
        optional={"tool_choice": TOOL_CHOICES, "parallel_tool_calls": st.booleans(), "stream": st.booleans()},
    ),
    "/v1/responses": st.fixed_dictionaries(
        {
            "input": ITEMS,
            "tools": st.lists(
                st.builds(lambda kind, function: {"type": kind, **function}, KINDS, FUNCTIONS), max_size=2
            ),
        },
        optional={"tool_choice": TOOL_CHOICES, "parallel_tool_calls": st.booleans(), "stream": st.booleans()},
    ),
}


SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from(
            [{"type": "string"}, {"type": "integer"}, {"type": "null"}, {"enum": ["a", 1]}, {}, True]
        ),
        st.fixed_dictionaries({"type": st.just("string")}, optional={"pattern": TEXT, "maxLength": NUMBERS}),
        st.sampled_from(
            [{"$ref": "#"}, {"$ref": "#/nowhere"}, {"type": "decimal"}, {"const": "\ud83d\ude00"}]
        ),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda one: {"type": "object", "properties": {"a": one}, "required": ["a"]}, inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, max_size=3)),
    ),
    max_leaves=4,
)
REGEXES = st.sampled_from(["", "a+", "(", "[0-9]{1,4}", "(a|b)*c", "\\d{9999}", "(?=x)", "(x+x+)+y", "\x00"])
GRAMMARS = st.sampled_from(
    ["", 'start: "a" | "b"', "start: start", 'root ::= "a"', "start: nothing", "}{", "a" * 300]
)
FORMS = st.one_of(
    st.fixed_dictionaries(
        {
            "response_format": st.one_of(
                st.fixed_dictionaries(
                    {
                        "type": st.sampled_from(["json_schema", "json_object", "text", "regex"]),
                        "json_schema": st.fixed_dictionaries({"name": TEXT, "schema": SCHEMAS}),
                    }
                ),
                VALUES,
            )
        }
    ),
    st.fixed_dictionaries(
        {
            "structured_outputs": st.fixed_dictionaries(
                {}, optional={"json": SCHEMAS, "regex": REGEXES, "grammar": GRAMMARS, "choice": VALUES}
            )
        }
    ),
    st.one_of(
        st.builds(lambda one: {"guided_json": one}, SCHEMAS),
        st.builds(lambda one: {"guided_regex": one}, REGEXES),
        st.builds(lambda one: {"guided_grammar": one}, GRAMMARS),
        st.builds(lambda one: {"guided_choice": one}, st.one_of(st.lists(TEXT, max_size=3), VALUES)),
    ),
)


SAYS_CALL = say('<think>Hm.</think>Well.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A request that is right but for a few fields."""
    schema, right = ROUTES[path]
    fields = {name: VALUES for name in schema.__struct_fields__ if name != "model"}
    if "messages" in fields:
        fields["messages"] = st.one_of(MESSAGES, VALUES)
    some = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True)
    changes = some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return changes.map(lambda change: {"model": MODEL, **right, **change})


async def ask(path: str, body: bytes, text: TextModel | None = None) -> None:
    engine = FakeEngine(per_step=8)
    if text is not None:
        engine.script, engine.info = SAYS_CALL, msgspec.structs.replace(INFO, max_model_len=8192)
    if path == "/v1/embeddings":
        engine.info = POOLING_INFO
    state = make_state(engine)
    state.text = text or state.text
    try:
        async with asyncio.timeout(60), in_process(state) as client:
            answer = await client.post(path, content=body)
    finally:
        if state.grammars is not None:
            state.grammars.close()
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = strict_json(answer.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 2000, "the message echoes the request"
    assert engine.in_flight == 0


@pytest.mark.parametrize("path", WITH_TOOLS)
def test_any_tools_and_items(path: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(WITH_TOOLS[path])
    def check(body: dict[str, Any]) -> None:
        asyncio.run(ask(path, json.dumps({"model": MODEL, **body}).encode(), text_side(QWEN3)))

    check()


def test_any_form() -> None:
    """Schemas, regular expressions and grammars, good and bad; all are tried out by one process."""

    async def ask_all(requests: list[bytes]) -> None:
        state = make_state(FakeEngine(per_step=8))
        try:
            async with asyncio.timeout(200), in_process(state) as client:
                for body in requests:
                    answer = await client.post("/v1/completions", content=body)
                    assert answer.status_code in (200, 400), (body, answer.text)
                    if answer.status_code == 400:
                        assert strict_json(answer.content)["error"]["param"], body
        finally:
            if state.grammars is not None:
                state.grammars.close()

    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(FORMS, min_size=20, max_size=20))
    def check(forms: list[dict[str, Any]]) -> None:
        bodies = [json.dumps({"model": MODEL, "prompt": "x", **form}).encode() for form in forms]
        asyncio.run(ask_all(bodies))

    check()


@pytest.mark.parametrize("path", ROUTES)
def test_any_values_in_any_fields(path: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(bodies(path))
    def check(body: dict[str, Any]) -> None:
        asyncio.run(ask(path, json.dumps(body).encode()))

    check()
