"""Which requests are of one conversation, as far as their first bytes tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.affinity import conversation_key


def key(**fields: Any) -> int | None:
    return conversation_key(json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize("field", ["messages", "input"])
def test_later_turns_have_the_key_of_the_first(field: str) -> None:
    def turns(question: str, more: int) -> list[dict[str, str]]:
        first = {"role": "user", "content": question}
        return [first, *({"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}) * more]

    first = key(**{field: turns("How are you?", 0)})
    assert first is not None
    assert key(**{field: turns("How are you?", 3)}) == first
    assert key(**{field: turns("Who are you?", 0)}) != first


@pytest.mark.parametrize("field", ["prompt", "inputs", "input"])
def test_texts_are_told_apart(field: str) -> None:
    assert key(**{field: "How are you?"}) == key(**{field: "How are you?"})
    assert key(**{field: "How are you?"}) != key(**{field: "Who are you?"})


def test_a_body_without_a_prompt_has_no_key() -> None:
    assert key(tokens=[1, 2]) is None
