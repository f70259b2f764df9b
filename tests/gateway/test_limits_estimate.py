"""What is reserved for a request, before anybody knows its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway.inbound import MAX_SEQUENCES, parse_body
from gateway.limits.estimate import COMPLETION, USUAL_ANSWER, reservation, sequences

WORDS = "The quick brown fox jumps over the lazy dog. "


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"messages": [{"role": "user", "content": WORDS}], "max_tokens": 100}, 100),
        ({"messages": [{"role": "user", "content": WORDS}], "max_completion_tokens": 70}, 70),
        ({"messages": [{"role": "user", "content": WORDS}], "max_tokens": 100, "n": 3}, 300),
        ({"messages": [{"role": "user", "content": WORDS}]}, USUAL_ANSWER),
        ({"input": WORDS, "max_output_tokens": 80}, 80),
        ({"input": [{"role": "user", "content": WORDS}]}, USUAL_ANSWER),
        ({"prompt": WORDS}, COMPLETION),
        ({"prompt": WORDS, "max_tokens": None}, COMPLETION),
        ({"prompt": [WORDS, WORDS], "max_tokens": 10, "n": 2}, 40),
        ({"prompt": list(range(12)), "max_tokens": 10}, 10),
        ({"prompt": [[1, 2, 3], [4, 5, 6]], "max_tokens": 10}, 20),
    ],
)
def test_it_is_the_prompt_and_all_answers(body: dict[str, Any], answers: int) -> None:
    """A sentence of nine words has ten to eleven tokens."""
    prompt = reservation(json.dumps({"model": "m", **body}).encode()) - answers
    assert 5 <= prompt <= 40


def test_token_ids_count_exactly() -> None:
    for prompt, prompts in (([7] * 500, 1), ([[7] * 250] * 2, 2)):
        body = json.dumps({"prompt": prompt, "max_tokens": 1}, indent=1).encode()
        assert reservation(body) == 500 + prompts


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"max_tokens": True},
        {"max_tokens": 1.5, "n": 0},
        {"n": 10**9, "max_tokens": 1},
        {"prompt": ["a", 1]},
        {"prompt": {"a": 1}},
        {"prompt": []},
        {"messages": "nonsense"},
    ],
)
def test_nonsense_is_left_to_the_worker(body: dict[str, Any]) -> None:
    assert 0 < reservation(json.dumps(body).encode()) < 1000


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        (WORDS, 9, 12),
        ([WORDS, WORDS], 18, 26),
        ([5, 6, 7], 3, 3),
        ([[5, 6], [7]], 3, 3),
        ("", 1, 1),
        (None, 1, 1),
    ],
)
def test_embeddings_have_inputs_and_no_answers(value: Any, least: int, most: int) -> None:
    body = json.dumps({"model": "m", "input": value}).encode()
    assert least <= reservation(body, embeds=True) <= most


def test_what_isnt_json_is_no_failure() -> None:
    assert reservation(b"{") == USUAL_ANSWER
    assert reservation(b'{"prompt": "\xff"}') > 0


@pytest.mark.parametrize(
    ("n", "prompt", "count"),
    [
        (None, "", 1),
        (4, "", 4),
        (None, '"one, two, three"', 1),
        (None, '["one", "two, three"]', 2),
        (3, '["one", "two"]', 6),
        (2, "[1, 2, 3]", 2),
        (2, "[[1, 2], [3], [4]]", 6),
        (10**9, "", 128),
        (-1, "[]", 1),
        (True, '["a", 1]', 1),
        ("4", "{}", 1),
    ],
)
def test_sequences_are_answers_times_prompts(n: object, prompt: str, count: int) -> None:
    assert sequences(n, prompt.encode()) == count


LONG = ["x" * 100] * 20_000


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"model": "m", "user": "u" * 5000, "stream": True, "n": 3}, ("m", "u" * 5000, True, 3)),
        ({"model_name": "m", "user": [[]] * 9000, "stream": [{}] * 9000, "n": {}}, ("m", None, False, 1)),
        ({"model": "m", "n": [[]] * 9000, "prompt": LONG}, ("m", None, False, MAX_SEQUENCES)),
        ({"model": "m", "prompt": [[1, 2]] * 3, "n": 2}, ("m", None, False, 6)),
    ],
)
def test_large_bodies_are_read_as_small_ones_are(fields: dict[str, Any], read: tuple[Any, ...]) -> None:
    body = json.dumps({**fields, "messages": "x" * 100_000}).encode()
    inbound = parse_body(body, {"path": "/v1/completions", "query_string": b""})
    assert (inbound.model, inbound.user, inbound.streams, inbound.sequences) == read
    for model in ([[]] * 9000, {"a": 1}, 5):
        with pytest.raises(ApiError, match="must be a string") as refused:
            parse_body(json.dumps({"x": LONG, "model": model}).encode(), {"query_string": b"", "path": "/"})
        assert refused.value.code == "invalid_type"


def test_many_texts_are_estimated_as_few_are() -> None:
    few = [reservation(json.dumps({"prompt": LONG[:count]}).encode()) for count in (1, 100)]
    many = reservation(json.dumps({"prompt": LONG}).encode())
    assert many == pytest.approx(20_000 * (few[1] - few[0]) / 99, rel=0.1)


@pytest.mark.parametrize(
    ("path", "value", "weight"),
    [
        ("/v1/embeddings", ["a", "b", "c"], 3),
        ("/v1/embeddings", [[1, 2], [3]], 2),
        ("/v1/embeddings", "a", 1),
        ("/v1/embeddings", [1, 2, 3], 1),
        ("/v1/embeddings", ["a"] * 500, MAX_SEQUENCES),
        ("/v1/responses", [{"role": "user", "content": "a"}] * 3, 1),
    ],
)
def test_what_inputs_weigh_on_a_worker(path: str, value: Any, weight: int) -> None:
    body = json.dumps({"model": "m", "input": value}).encode()
    assert parse_body(body, {"path": path, "query_string": b""}).sequences == weight
