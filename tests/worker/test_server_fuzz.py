"""Whatever JSON a client sends: an answer or an error of the one shape, never a failure of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.fake_engine import MODEL, FakeEngine, in_process, make_state, strict_json
from worker.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
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


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A request that is right but for a few fields."""
    schema, right = ROUTES[path]
    fields = {name: VALUES for name in schema.__struct_fields__ if name != "model"}
    if "messages" in fields:
        fields["messages"] = st.one_of(MESSAGES, VALUES)
    some = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True)
    changes = some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return changes.map(lambda change: {"model": MODEL, **right, **change})


async def ask(path: str, body: bytes) -> None:
    engine = FakeEngine(per_step=8)
    async with asyncio.timeout(20), in_process(make_state(engine)) as client:
        answer = await client.post(path, content=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = strict_json(answer.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 2000, "the message echoes the request"
    assert engine.in_flight == 0


@pytest.mark.parametrize("path", ROUTES)
def test_any_values_in_any_fields(path: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(bodies(path))
    def check(body: dict[str, Any]) -> None:
        asyncio.run(ask(path, json.dumps(body).encode()))

    check()
