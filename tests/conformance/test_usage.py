"""`usage`: what was counted, in every form of answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.conformance.conftest import MODEL
from worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
LONG = "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 3


def complete(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    ignore = {"ignore_eos": True, **options.pop("extra_body", {})}
    options = {"max_tokens": 3, "temperature": 0, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options, extra_body=ignore)


def test_prompts_add_up(client: OpenAI, tokenizer: Tokenizer) -> None:
    usage = complete(client, [PROMPT, LONG]).usage
    assert usage.prompt_tokens == len(tokenizer.encode(PROMPT)) + len(tokenizer.encode(LONG))
    assert usage.completion_tokens == 6


def test_a_prompt_with_several_answers_counts_once(client: OpenAI, tokenizer: Tokenizer) -> None:
    usage = complete(client, n=4).usage
    assert usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_token_ids_count_as_they_are(client: OpenAI) -> None:
    assert complete(client, [7, 8, 9, 10]).usage.prompt_tokens == 4
    assert complete(client, [[7], [8, 9]]).usage.prompt_tokens == 3


def test_cached_tokens_are_whole_pages_of_an_earlier_prompt(client: OpenAI, tokenizer: Tokenizer) -> None:
    salt = {"cache_salt": "usage-cached"}
    first = complete(client, LONG, extra_body=salt).usage
    second = complete(client, LONG, extra_body=salt).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    pages = (len(tokenizer.encode(LONG)) - 1) // 16
    assert second.prompt_tokens_details.cached_tokens == 16 * pages > 0
    assert second.prompt_tokens == first.prompt_tokens


def test_another_salt_shares_nothing(client: OpenAI) -> None:
    for salt in ("usage-a", "usage-b"):
        usage = complete(client, LONG, extra_body={"cache_salt": salt}).usage
        assert usage.prompt_tokens_details.cached_tokens == 0


def test_the_stop_token_counts_and_what_follows_a_stop_string_does_not(client: OpenAI) -> None:
    whole = complete(client, max_tokens=6, logprobs=0)
    tokens = whole.choices[0].logprobs.tokens
    by_string = complete(client, max_tokens=6, stop=tokens[2], logprobs=0)
    at = tokens.index(tokens[2])
    assert by_string.usage.completion_tokens == at + 1
    assert by_string.choices[0].text == "".join(tokens[:at])


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"prompt": [PROMPT, LONG]}], ids=["one", "n", "prompts"])
def test_a_stream_s_usage_is_the_whole_answer_s(client: OpenAI, options: dict[str, Any]) -> None:
    whole = complete(client, **options).usage
    *_, last = complete(client, **options, stream=True, stream_options={"include_usage": True})
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole, name)


def test_usage_is_null_in_every_chunk_before(client: OpenAI) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, _ = complete(client, **options)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in complete(client, stream=True))


def test_usage_not_wanted_after_all(client: OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": False}))
    assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_native_routes_count_the_same(http: httpx.Client, client: OpenAI, path: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    response = http.post(path, json=body).raise_for_status()
    usage = json.loads(response.text.strip().splitlines()[-1])["usage"]
    expected = complete(client).usage
    assert usage["prompt_tokens"] == expected.prompt_tokens
    assert usage["completion_tokens"] == expected.completion_tokens
    assert usage["total_tokens"] == expected.total_tokens


def test_a_chat_counts_its_template(client: OpenAI, http: httpx.Client) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    usage = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage
    counted = http.post("/tokenize", json={"model": MODEL, "messages": messages}).json()["count"]
    assert usage is not None
    assert usage.prompt_tokens == counted
