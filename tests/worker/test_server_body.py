"""Bodies are counted before they are decoded: what would hold up everybody else is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from contracts.errors import ApiError
from tests.worker.fake_engine import MODEL, in_process, make_state
from worker.server import body as body_module
from worker.server.body import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, Contents, check_contents, contents

RANDOM = random.Random(7)


def any_value(depth: int = 0) -> Any:
    kind = RANDOM.randint(0, 5 if depth < 5 else 2)
    if kind == 0:
        return RANDOM.randint(0, 99)
    if kind < 3:
        return any_text()
    if kind == 3:
        return {any_text(): any_value(depth + 1) for _ in range(RANDOM.randint(0, 3))}
    return [any_value(depth + 1) for _ in range(RANDOM.randint(0, 3))]


def any_text() -> str:
    return "".join(RANDOM.choice('a"\\,[{:\u4e2d') for _ in range(RANDOM.randint(0, 6)))


def counted(value: Any) -> Contents:
    """The same from the decoded value."""
    if isinstance(value, str):
        return Contents(strings=1)
    if not isinstance(value, (dict, list)):
        return Contents()
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    parts = [counted(one) for one in inner]
    return Contents(
        containers=1 + sum(part.containers for part in parts),
        strings=sum(part.strings for part in parts),
        values=max(0, len(value) - 1) + sum(part.values for part in parts),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_what_is_within_strings_does_not_count(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Slices begin anywhere: within a string, between a backslash and what it escapes."""
    monkeypatch.setattr(body_module, "_SLICE", size)
    for _ in range(300):
        value = any_value()
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            assert contents(text.encode()) == counted(value), text


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"functions": [' + b",".join([b"{}"] * (MAX_CONTAINERS + 1)) + b"]}", "objects and lists"),
        (b'{"stop": [' + b",".join([b'"a"'] * (MAX_STRINGS + 1)) + b"]}", "strings"),
        (b'{"prompt": [' + b",".join([b"1"] * (MAX_VALUES + 2)) + b"]}", "values"),
    ],
)
async def test_too_many_of_a_kind(body: bytes, what: str) -> None:
    with pytest.raises(ApiError, match=f"holds [0-9]+ {what}.*at most [0-9]+ are read") as refused:
        await check_contents(body)
    assert (refused.value.status, refused.value.code) == (400, "too_many_values")


async def test_text_may_be_as_long_as_the_body_may() -> None:
    await check_contents(json.dumps({"prompt": '[{"a", "b"}], \\' * 500_000}).encode())
    async with in_process(make_state()) as client:
        body = {"model": MODEL, "prompt": "x", "foo": [[]] * MAX_CONTAINERS}
        response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_values")
