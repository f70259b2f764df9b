"""Every parameter at its bounds: what is just inside is accepted and does what it says, what is just outside
is a BadRequestError that names the parameter."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.conformance.conftest import MAX_MODEL_LEN, MODEL
from worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
OF_THE_SDK = {
    "temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias",
    "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "user", "metadata",
}  # fmt: skip


def ask(client: OpenAI, **fields: Any) -> Any:
    known = {name: value for name, value in fields.items() if name in OF_THE_SDK}
    extra = {name: value for name, value in fields.items() if name not in OF_THE_SDK}
    options: dict[str, Any] = {"max_tokens": 1, **known}
    return client.chat.completions.create(model=MODEL, messages=QUESTION, **options, extra_body=extra)


INSIDE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 2},
    {"temperature": 1e-6},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0},
    {"min_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 2**31},
    {"n": 1},
    {"n": 16},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": -2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 2},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"seed": 0},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": True, "top_logprobs": 20},
    {"stop": [f"never-{i}" for i in range(16)]},
    {"stop": "x" * 1024},
    {"stop": []},
    {"logit_bias": {"5": -100, "6": 100}},
    {"logit_bias": {str(i): 0.5 for i in range(1024)}},
    {"logit_bias": {}},
    {"stop_token_ids": list(range(100, 356))},
    {"min_tokens": 0},
    {"min_tokens": 1},
    {"priority": -1_000_000},
    {"priority": 1_000_000},
    {"cache_salt": "s" * 256},
    {"user": "u" * 5000},
    {"max_completion_tokens": 1},
    {"chat_template_kwargs": {"unknown": [1, {"a": None}]}},
    {"temperature": None, "top_p": None, "seed": None, "stop": None, "logit_bias": None},
]


def name_of(fields: dict[str, Any]) -> str:
    return ",".join(f"{name}={str(value)[:12]}" for name, value in fields.items())


@pytest.mark.parametrize("fields", INSIDE, ids=name_of)
def test_at_the_bound_is_inside(client: OpenAI, fields: dict[str, Any]) -> None:
    answer = ask(client, **fields)
    assert len(answer.choices) == fields.get("n", 1)
    assert answer.usage.completion_tokens == fields.get("n", 1)
    if "top_logprobs" in fields:
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == fields["top_logprobs"]


OUTSIDE: list[tuple[str, Any]] = [
    ("temperature", 2.0000001),
    ("temperature", -1e-9),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.0000001),
    ("min_p", -0.001),
    ("min_p", 1.001),
    ("top_k", -2),
    ("top_k", 1.5),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("presence_penalty", 2.001),
    ("frequency_penalty", -2.001),
    ("repetition_penalty", 0.009),
    ("repetition_penalty", 2.001),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", "lucky"),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1025),
    ("stop", ["ok", ""]),
    ("stop", [5]),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"-5": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [5]),
    ("stop_token_ids", list(range(257))),
    ("stop_token_ids", [-1]),
    ("priority", 1_000_001),
    ("cache_salt", "s" * 257),
    ("max_tokens", 2**31 + 1),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 1),
    ("chat_template_kwargs", [1]),
    ("chat_template_kwargs", {"a": "x" * 70_000}),
    ("stream", "true"),
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=lambda value: str(value)[:24])
def test_just_outside_is_named(client: OpenAI, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **{name: value})
    assert (caught.value.param or "").split("[")[0].split(".")[0] == name
    assert caught.value.type == "invalid_request_error"
    assert name in caught.value.message


def test_prompt_and_answer_fill_the_context_exactly(client: OpenAI, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("word " * 600)[: MAX_MODEL_LEN - 2]

    def complete(tokens: int) -> Any:
        ignore = {"ignore_eos": True}
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, extra_body=ignore)

    assert complete(2).usage.total_tokens == MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError) as caught:
        complete(3)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"


def test_without_a_limit_an_answer_ends_with_the_context(client: OpenAI, tokenizer: Tokenizer) -> None:
    messages: Any = [{"role": "user", "content": "word " * (MAX_MODEL_LEN - 60)}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"prompt": "x", "n": 2}, "n"),
        ("/generate", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/generate", {"prompt": ["x"]}, "prompt"),
        ("/generate", {}, "prompt"),
        ("/generate_stream", {"prompt": "x", "temperature": 3}, "temperature"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/v1/embeddings", {"input": "x"}, "model"),
        ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 200, "n": 10}, "n"),
        ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("/v1/completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
        ("/v1/completions", {"prompt": [5, "x"]}, "prompt"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_on_every_route_the_field_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].split("[")[0] == param
    assert error["type"] == "invalid_request_error"
