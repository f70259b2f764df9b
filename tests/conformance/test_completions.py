"""Plain completions: text and token prompts, lists of them, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.conformance.conftest import MODEL
from worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
OTHER = "One, two, three,"


def complete(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)


@pytest.fixture(scope="module")
def answer(client: OpenAI) -> Any:
    return complete(client, logprobs=2)


def test_shape(answer: Any) -> None:
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].finish_reason == "length"
    assert "Paris" in answer.choices[0].text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_token_ids_are_the_same_prompt(client: OpenAI, answer: Any, tokenizer: Tokenizer) -> None:
    by_ids = complete(client, tokenizer.encode(PROMPT))
    assert by_ids.choices[0].text == answer.choices[0].text
    assert by_ids.usage.prompt_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize("as_ids", [False, True])
def test_list_of_prompts(client: OpenAI, answer: Any, tokenizer: Tokenizer, as_ids: bool) -> None:
    prompts: list[Any] = [PROMPT, OTHER]
    both = complete(client, [tokenizer.encode(prompt) for prompt in prompts] if as_ids else prompts)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == answer.choices[0].text
    assert both.choices[1].text == complete(client, OTHER).choices[0].text
    assert both.usage.completion_tokens == 12


def test_n_answers_for_each_prompt(client: OpenAI, answer: Any) -> None:
    choices = complete(client, [PROMPT, OTHER], n=2).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert choices[0].text == choices[1].text == answer.choices[0].text
    assert choices[2].text == choices[3].text != answer.choices[0].text


def test_logprobs(answer: Any) -> None:
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.tokens) == 6
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)
    starts = [sum(map(len, logprobs.tokens[:i])) for i in range(6)]
    assert logprobs.text_offset == starts
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())


def test_sixteen_tokens_unless_told_otherwise(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stop(client: OpenAI, answer: Any) -> None:
    text = answer.choices[0].text
    stopped = complete(client, stop=text[5:8])
    assert stopped.choices[0].text == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"


def test_seed(client: OpenAI) -> None:
    first, again = (complete(client, temperature=1.5, seed=3).choices[0].text for _ in range(2))
    assert first == again


def test_stream(client: OpenAI, answer: Any) -> None:
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_of_several_prompts_with_usage(client: OpenAI, answer: Any) -> None:
    *chunks, last = complete(client, [PROMPT, OTHER], stream=True, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [answer.choices[0].text, complete(client, OTHER).choices[0].text]
    assert last.choices == []
    assert last.usage.completion_tokens == 12


def test_tokenize_and_detokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    made = http.post("/tokenize", json={"model": MODEL, "prompt": "héllo 👍"}).raise_for_status().json()
    assert made["tokens"] == tokenizer.encode("héllo 👍")
    body = {"model": MODEL, "tokens": made["tokens"]}
    back = http.post("/detokenize", json=body).raise_for_status().json()
    assert back["prompt"] == "héllo 👍"
