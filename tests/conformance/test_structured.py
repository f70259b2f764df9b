"""Structured output as OpenAI's SDK asks for it: the real model at temperature 1, behind the gateway."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.conformance.conftest import MODEL

pytestmark = pytest.mark.timeout(400)
ASK: Any = [{"role": "user", "content": "Make up an order as JSON."}]
Code = Annotated[str, Field(pattern="^[A-Z]{2}-[0-9]{2}$")]


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Item(BaseModel):
    code: Code
    size: Size
    gift: bool


class Cash(BaseModel):
    kind: Literal["cash"]


class Card(BaseModel):
    kind: Literal["card"]
    last: Annotated[int, Field(ge=0, le=9999)]


class Order(BaseModel):
    """An order with everything that makes schemas hard."""

    items: Annotated[list[Item], Field(min_length=1, max_length=2)]
    payment: Cash | Card
    note: Annotated[str, Field(max_length=12)] | None


def test_parse_gives_an_object(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Order, temperature=1, seed=5, max_tokens=300
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    order = choice.message.parsed
    assert isinstance(order, Order)
    assert 1 <= len(order.items) <= 2
    assert all(re.fullmatch("[A-Z]{2}-[0-9]{2}", item.code) for item in order.items)


def test_a_stream_of_an_object(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Item, temperature=1, seed=6, max_tokens=100
    ) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Item)
    assert completion.choices[0].finish_reason == "stop"


def test_responses_parse_too(client: OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input="Make up an item.", text_format=Item, temperature=1, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Item)


def test_json_mode(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=20, seed=1
    )
    content = completion.choices[0].message.content
    assert content is not None
    assert content.startswith("{")


def test_what_vllm_s_users_send(client: OpenAI) -> None:
    """In extra_body, on completions."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_choice": ["tea", "coffee"]}, "tea|coffee"),
        ({"guided_grammar": 'root ::= "<" [ab]{3} ">"'}, "<[ab]{3}>"),
    ]
    for fields, pattern in cases:
        completion = client.completions.create(model=MODEL, prompt="So:", n=2, extra_body=fields)
        for choice in completion.choices:
            assert re.fullmatch(pattern, choice.text), fields
            assert choice.finish_reason == "stop"


def test_a_document_that_is_cut_says_so(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=5,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "o", "schema": Order.model_json_schema()},
        },
    )
    assert completion.choices[0].finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(completion.choices[0].message.content or "")


def test_a_bad_schema_is_a_bad_request(client: OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "o", "schema": {"type": "strnig"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, response_format=format)
    assert caught.value.param == "response_format.json_schema.schema"
    assert "strnig" in caught.value.message
