"""What OpenAI's and vLLM's clients ask about prompts, and forbid in answers, with the real model."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.conformance.conftest import MODEL
from worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
CHAT: Any = [{"role": "user", "content": "Say hello."}]


def complete(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def score(client: OpenAI, tokenizer: Tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Log-probability of a continuation, and whether it is the likeliest, as lm-eval-harness takes them."""
    prompt = tokenizer.encode(context + continuation)
    start = len(tokenizer.encode(context))
    logprobs = complete(client, prompt, max_tokens=1, echo=True, logprobs=1).choices[0].logprobs
    scores, tops = logprobs.token_logprobs[start:-1], logprobs.top_logprobs[start:-1]
    assert len(logprobs.token_logprobs) == len(prompt) + 1
    return sum(scores), all(one == max(top.values()) for one, top in zip(scores, tops))


def test_echo_is_the_prompt_before_the_answer(client: OpenAI) -> None:
    plain, echoed = complete(client), complete(client, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    assert echoed.usage.total_tokens == plain.usage.total_tokens


def test_an_echoed_stream_is_the_whole_answer(client: OpenAI) -> None:
    whole = complete(client, echo=True, logprobs=1).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(client, echo=True, logprobs=1, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
    assert tokens == whole.logprobs.tokens
    assert "".join(tokens) == whole.text


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_a_prompt_alone(client: OpenAI, tokenizer: Tokenizer, logprobs: int) -> None:
    answer = complete(client, echo=True, max_tokens=0, logprobs=logprobs)
    told = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT
    assert told.tokens == [tokenizer.token_text(token) for token in tokenizer.encode(PROMPT)]
    assert told.token_logprobs[0] is None
    assert all(value < 0 for value in told.token_logprobs[1:])
    assert all(logprobs <= len(top) <= logprobs + 1 for top in told.top_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_continuations_are_told_apart(client: OpenAI, tokenizer: Tokenizer) -> None:
    paris, greedy = score(client, tokenizer, PROMPT, " Paris")
    assert greedy
    for other in (" Berlin", " a", " Paris Paris"):
        value, greedy = score(client, tokenizer, PROMPT, other)
        assert value < paris
        assert not greedy


def test_vllms_prompt_logprobs(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    told = complete(client, extra_body={"prompt_logprobs": 2}).choices[0].prompt_logprobs
    scored = complete(client, echo=True, max_tokens=0, logprobs=0).choices[0].logprobs.token_logprobs
    assert told[0] is None
    assert len(told) == len(ids)
    for token, entry, value in zip(ids[1:], told[1:], scored[1:]):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert entry[str(token)]["decoded_token"] == tokenizer.token_text(token)
        assert sorted(one["rank"] for one in entry.values())[:2] == [1, 2]
    chat: Any = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=1, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    )
    assert [next(iter(entry)) for entry in chat.prompt_logprobs[1:]] == [
        str(token) for token in chat.prompt_token_ids[1:]
    ]
    assert len(chat.prompt_token_ids) == chat.usage.prompt_tokens


def test_bad_words_do_not_come(client: OpenAI) -> None:
    assert "Paris" in complete(client).choices[0].text
    assert "Paris" not in complete(client, extra_body={"bad_words": ["Paris"]}, max_tokens=40).choices[0].text


def test_only_allowed_tokens_come(client: OpenAI, tokenizer: Tokenizer) -> None:
    allowed = [tokenizer.encode(word)[0] for word in (" London", " Rome", " Madrid")]
    options = {"allowed_token_ids": allowed, "return_token_ids": True}
    for seed in range(3):
        answer = complete(client, extra_body=options, temperature=2, seed=seed)
        assert set(answer.choices[0].token_ids) <= set(allowed)
        assert answer.choices[0].finish_reason == "length"


def test_truncated_prompts(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Paris is a city. " * 200 + PROMPT)
    kept = complete(client, ids, extra_body={"truncate_prompt_tokens": 20})
    assert kept.usage.prompt_tokens == 20
    assert kept.choices[0].text == complete(client, ids[-20:]).choices[0].text
    most = complete(client, ids, extra_body={"truncate_prompt_tokens": -1})
    assert most.usage.total_tokens == 512


def test_token_ids_in_streams(client: OpenAI, tokenizer: Tokenizer) -> None:
    whole = complete(client, extra_body={"return_token_ids": True}).choices[0]
    assert tokenizer.decode(whole.token_ids) == whole.text
    chunks = list(complete(client, extra_body={"return_token_ids": True}, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == whole.token_ids
    assert chunks[0].choices[0].prompt_token_ids == whole.prompt_token_ids == tokenizer.encode(PROMPT)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "n": 2}, "n"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"extra_body": {"truncate_prompt_tokens": 513}}, "truncate_prompt_tokens"),
        ({"extra_body": {"allowed_token_ids": [10**6]}}, "allowed_token_ids"),
        ({"extra_body": {"bad_words": [" "]}}, "bad_words"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"logits_processors": ["a.b"]}}, "logits_processors"),
    ],
    ids=str,
)
def test_what_can_not_be_is_named(client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        complete(client, **options)
    assert refused.value.param == param
