"""LangChain's ChatOpenAI, unmodified, against the gateway; the model says whatever follows `SAY:`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.conformance.conftest import MODEL

if TYPE_CHECKING:  # else when it is used: every process of a run imports this file, and one runs it
    from langchain_openai import ChatOpenAI

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"22 degrees in {city}"


class Trip(BaseModel):
    """A way from one city to another."""

    start: str
    goal: str
    days: int


TRIP = {"start": "Köln", "goal": "Bonn", "days": 2}


@pytest.fixture(scope="module")
def chat(scripted: OpenAI) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": str(scripted.base_url), "api_key": "unused", "timeout": 100}
    return ChatOpenAI(model="scripted", max_retries=0, **options)


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke([("system", "Be brief."), ("human", "SAY:Grüße, 👍🏽!")])
    assert answer.content == "Grüße, 👍🏽!"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "scripted"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )


def test_stream(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream("SAY:One two three four five", stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == "One two three four five"
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]


async def test_asynchronously(chat: ChatOpenAI) -> None:
    assert (await chat.ainvoke("SAY:later")).content == "later"
    pieces = [str(chunk.content) async for chunk in chat.astream("SAY:in pieces, later")]
    assert "".join(pieces) == "in pieces, later"


def test_batch(chat: ChatOpenAI) -> None:
    answers = chat.batch([f"SAY:number {i}" for i in range(6)])
    assert [answer.content for answer in answers] == [f"number {i}" for i in range(6)]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_answered(chat: ChatOpenAI, streamed: bool) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    bound = chat.bind_tools([get_weather])
    question = HumanMessage(f"SAY:{CALL}")
    if streamed:
        first, *rest = bound.stream([question])
        answer: Any = first
        for chunk in rest:
            answer = answer + chunk
    else:
        answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Köln"})
    said = AIMessage(content="", tool_calls=answer.tool_calls)
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    final = bound.invoke([question, said, result, HumanMessage("SAY:It is warm.")])
    assert final.content == "It is warm."
    assert not final.tool_calls


def test_structured_output_by_schema(chat: ChatOpenAI) -> None:
    made = chat.with_structured_output(Trip, method="json_schema").invoke(f"SAY:{json.dumps(TRIP)}")
    assert made == Trip(**TRIP)


def test_structured_output_by_a_function(chat: ChatOpenAI) -> None:
    shaped = chat.with_structured_output(Trip, method="function_calling")
    assert shaped.invoke(f"SAY:{json.dumps(TRIP)}") == Trip(**TRIP)


class Pick(BaseModel):
    """A choice."""

    colour: Literal["red", "green"]
    sure: bool


@pytest.mark.model
def test_a_real_model_fills_in_the_schema(url: str) -> None:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused", "timeout": 100, "seed": 1}
    chat = ChatOpenAI(model=MODEL, max_retries=0, **options)
    shaped = chat.with_structured_output(Pick, method="function_calling", strict=True)
    made = shaped.invoke("Do you like red or green?")
    assert isinstance(made, Pick)


def test_errors_are_the_sdk_s(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.bind(temperature=9).invoke("SAY:x")
    with pytest.raises(openai.NotFoundError):
        chat.bind(model="nobody").invoke("SAY:x")
