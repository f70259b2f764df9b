"""Chat completions, whole answers, through the unmodified OpenAI SDK."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openai import OpenAI

from tests.conformance.conftest import MODEL
from worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
LENGTH = 8


def ask(client: OpenAI, messages: list[Any] = QUESTION, **options: Any) -> Any:
    options = {"max_tokens": LENGTH, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(client: OpenAI, messages: list[Any] = QUESTION, **options: Any) -> str:
    content = ask(client, messages, **options).choices[0].message.content
    assert isinstance(content, str)
    return content


@pytest.fixture(scope="module")
def answer(client: OpenAI) -> Any:
    return ask(client, logprobs=True, top_logprobs=3)


@pytest.mark.parametrize("name", ["english", "chinese", "emoji", "system_multi_turn"])
def test_greedy_answer_is_the_reference(
    client: OpenAI, references: dict[str, Any], tokenizer: Tokenizer, name: str
) -> None:
    prompt = references[name]
    content = text_of(client, prompt["messages"], extra_body={"ignore_eos": True})
    assert content == tokenizer.decode(prompt["greedy_ids"][:LENGTH])


def test_shape_of_an_answer(answer: Any) -> None:
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < 120
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert not choice.message.tool_calls
    assert choice.finish_reason == "length"


def test_usage(client: OpenAI, references: dict[str, Any]) -> None:
    prompt = references["english"]
    usage = ask(client, prompt["messages"], max_tokens=3).usage
    assert usage.prompt_tokens == len(prompt["prompt_ids"])
    assert usage.completion_tokens == 3
    assert usage.total_tokens == usage.prompt_tokens + 3


def test_two_answers_have_two_ids(client: OpenAI) -> None:
    assert ask(client, max_tokens=1).id != ask(client, max_tokens=1).id


def test_content_may_be_a_list_of_text_parts(client: OpenAI, answer: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
    assert text_of(client, parts) == answer.choices[0].message.content


def test_content_of_an_assistant_may_be_null(client: OpenAI) -> None:
    def history(content: str | None) -> list[Any]:
        return [*QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]

    assert text_of(client, history(None), max_tokens=6) == text_of(client, history(""), max_tokens=6)


def test_developer_is_the_system_role_of_models_that_have_one(client: OpenAI, answer: Any) -> None:
    def instructed(role: str) -> list[Any]:
        return [{"role": role, "content": "You are a pirate."}, *QUESTION]

    as_system = text_of(client, instructed("system"))
    assert text_of(client, instructed("developer")) == as_system != answer.choices[0].message.content


def test_name_of_a_message_is_accepted(client: OpenAI) -> None:
    assert text_of(client, [{**QUESTION[0], "name": "Ada"}], max_tokens=2)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length_limit_by_either_name(client: OpenAI, field: str) -> None:
    limit: dict[str, Any] = {field: 4}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, **limit)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"


def test_both_length_limits_at_once_are_fine_when_equal(client: OpenAI) -> None:
    assert ask(client, max_tokens=3, max_completion_tokens=3).usage.completion_tokens == 3


def test_end_of_sequence_stops_and_does_not_show(client: OpenAI, tokenizer: Tokenizer) -> None:
    answer = ask(client, logit_bias={str(tokenizer.eos_token_ids[0]): 100})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ""
    assert answer.usage.completion_tokens == 1


def test_min_tokens_and_ignore_eos(client: OpenAI, tokenizer: Tokenizer) -> None:
    towards_end = {str(token): 100 for token in tokenizer.eos_token_ids}
    later = ask(client, logit_bias=towards_end, extra_body={"min_tokens": 3})
    assert later.choices[0].finish_reason == "stop"
    assert later.usage.completion_tokens == 4
    never = ask(client, logit_bias=towards_end, max_tokens=5, extra_body={"ignore_eos": True})
    assert never.choices[0].finish_reason == "length"
    assert never.usage.completion_tokens == 5


def test_n_answers(client: OpenAI) -> None:
    answer = ask(client, n=3, temperature=1.5, seed=7, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 18


def test_n_greedy_answers_are_one_answer(client: OpenAI, answer: Any) -> None:
    texts = {choice.message.content for choice in ask(client, n=2).choices}
    assert texts == {answer.choices[0].message.content}


def test_logprobs(answer: Any) -> None:
    content = answer.choices[0].logprobs.content
    assert len(content) == LENGTH
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        likeliest = [other.logprob for other in token.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True)
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert all(bytes(other.bytes).decode(errors="replace") == other.token for other in token.top_logprobs)


def test_bytes_of_the_tokens_joined_are_the_text(client: OpenAI, answer: Any, references: Any) -> None:
    emoji = ask(client, references["emoji"]["messages"], logprobs=True)
    for one in (answer, emoji):
        content = one.choices[0].logprobs.content
        assert b"".join(bytes(token.bytes) for token in content).decode() == one.choices[0].message.content


def test_bytes_that_are_no_text(client: OpenAI, tokenizer: Tokenizer) -> None:
    (first_byte,) = [t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"\xf0"]
    answer = ask(client, logit_bias={str(first_byte): 100}, logprobs=True, max_tokens=3)
    data = b"".join(bytes(token.bytes) for token in answer.choices[0].logprobs.content)
    assert data == b"\xf0\xf0\xf0"
    assert answer.choices[0].message.content == "\ufffd\ufffd\ufffd"


def test_no_logprobs_unless_asked_for(client: OpenAI, answer: Any) -> None:
    assert ask(client, max_tokens=1).choices[0].logprobs is None
    alone = ask(client, max_tokens=1, logprobs=True).choices[0].logprobs.content
    assert alone[0].top_logprobs == []
    assert alone[0].token == answer.choices[0].logprobs.content[0].token


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string_ends_the_answer_before_it(client: OpenAI, answer: Any, as_list: bool) -> None:
    text = answer.choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    stopped = ask(client, stop=["never in it", stop] if as_list else stop)
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_stop_string_across_tokens(client: OpenAI, answer: Any) -> None:
    text = answer.choices[0].message.content
    tokens = [token.token for token in answer.choices[0].logprobs.content]
    stop = tokens[2][-1] + tokens[3] + tokens[4][:2]
    stopped = ask(client, stop=stop, logprobs=True)
    shown = stopped.choices[0].message.content
    assert shown == text[: text.index(stop)]
    data = b"".join(bytes(token.bytes) for token in stopped.choices[0].logprobs.content)
    assert data.decode().startswith(shown)
    assert stopped.usage.completion_tokens == 5


def test_stop_string_that_never_comes_changes_nothing(client: OpenAI, answer: Any) -> None:
    # Its start comes: that is held back for a while, and must not be lost.
    text = answer.choices[0].message.content
    same = ask(client, stop=[text[-3:] + "\u0000never"])
    assert same.choices[0].message.content == text
    assert same.choices[0].finish_reason == "length"


def test_stop_string_may_be_kept(client: OpenAI, answer: Any) -> None:
    text = answer.choices[0].message.content
    kept = ask(client, stop=[text[4:7]], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(text[4:7]) + 3]


def test_seed_decides(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        return text_of(client, temperature=1.5, seed=seed, max_tokens=5)

    assert sample(11) == sample(11)
    assert len({sample(seed) for seed in (11, 12, 13)}) > 1


def test_logit_bias_bans_and_forces(client: OpenAI, answer: Any, tokenizer: Tokenizer) -> None:
    first = answer.choices[0].logprobs.content[0].token
    (banned,) = tokenizer.encode(first, add_special_tokens=False)
    assert not text_of(client, logit_bias={str(banned): -100}).startswith(first)
    (forced,) = tokenizer.encode(" blue", add_special_tokens=False)
    assert text_of(client, logit_bias={str(forced): 100}, max_tokens=3) == " blue blue blue"


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalty_costs_a_repetition_its_lead(
    client: OpenAI, answer: Any, tokenizer: Tokenizer, penalty: str
) -> None:
    first = answer.choices[0].logprobs.content[0].token
    (token,) = tokenizer.encode(first, add_special_tokens=False)
    # Reported log-probabilities are the model's own, so they tell what bias makes the repetition lead by 1.
    forced = ask(client, logit_bias={str(token): 100}, max_tokens=2, logprobs=True, top_logprobs=1)
    repeated = forced.choices[0].logprobs.content[1]
    assert repeated.token == first
    rival = repeated.top_logprobs[0]
    assert rival.token != first
    bias = {str(token): rival.logprob - repeated.logprob + 1}
    for strength, expected in ((0.0, first), (0.5, first), (1.5, rival.token)):
        text = text_of(client, logit_bias=bias, max_tokens=2, **{penalty: strength})
        assert text == first + expected


@pytest.mark.parametrize(
    "options", [{"top_p": 0.0001}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}]
)
def test_narrow_sampling_is_greedy(client: OpenAI, answer: Any, options: dict[str, Any]) -> None:
    assert text_of(client, temperature=1.0, **options) == answer.choices[0].message.content


def test_harmless_fields_are_accepted(client: OpenAI, answer: Any) -> None:
    same = text_of(
        client,
        user="somebody",
        response_format={"type": "text"},
        tool_choice="none",
        store=False,
        metadata={"a": "b"},
        extra_body={"no_such_field": 1},
    )
    assert same == answer.choices[0].message.content


def test_raw_response_has_the_headers(client: OpenAI, answer: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=LENGTH,
        temperature=0,
        extra_headers={"x-request-id": "conf-1"},
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.headers["x-request-id"] == "conf-1"
    parsed: Any = raw.parse()
    assert parsed.choices[0].message.content == answer.choices[0].message.content


def test_request_id_is_made_when_the_client_brings_none(client: OpenAI) -> None:
    first, second = ask(client, max_tokens=1), ask(client, max_tokens=1)
    assert first._request_id
    assert first._request_id != second._request_id
