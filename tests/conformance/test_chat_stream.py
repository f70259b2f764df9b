"""Chat completions as streams: they add up to the whole answer, and breaking off stops the worker."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.conformance.conftest import MODEL, Served, wait_until_idle

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
BASE: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}


def stream(client: OpenAI, **options: Any) -> list[Any]:
    return list(client.chat.completions.create(**{**BASE, **options}, stream=True))


def whole(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{**BASE, **options})


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_chunks_add_up_to_the_whole_answer(client: OpenAI) -> None:
    chunks = stream(client)
    assert text_of(chunks) == whole(client).choices[0].message.content
    assert len(chunks) > 4
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    assert {chunk.model for chunk in chunks} == {MODEL}


def test_role_comes_first_and_finish_reason_last(client: OpenAI) -> None:
    chunks = stream(client)
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles[0] == "assistant"
    assert set(roles[1:]) <= {None}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}


def test_usage_chunk_comes_last_and_only_when_asked_for(client: OpenAI) -> None:
    *chunks, last = stream(client, stream_options={"include_usage": True})
    assert last.choices == []
    assert all(chunk.usage is None for chunk in chunks)
    assert last.usage == whole(client).usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in stream(client))


def test_n_answers_side_by_side(client: OpenAI) -> None:
    chunks = stream(client, n=3)
    expected = whole(client).choices[0].message.content
    for index in range(3):
        assert text_of(chunks, index) == expected
    finished = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize("name", ["chinese", "emoji"])
def test_characters_of_several_bytes_are_never_broken(
    client: OpenAI, references: dict[str, Any], name: str
) -> None:
    options: dict[str, Any] = {"messages": references[name]["messages"], "max_tokens": 12}
    chunks = stream(client, **options)
    expected = whole(client, **options).choices[0].message.content
    assert text_of(chunks) == expected
    # Only what the length limit cuts off may be half a character, and it comes last.
    *before, _ = [chunk for chunk in chunks if chunk.choices[0].delta.content]
    assert "\ufffd" not in text_of(before)


def test_stop_string_is_never_seen_in_part(client: OpenAI) -> None:
    text = whole(client).choices[0].message.content
    stop = text[len(text) // 2 - 4 :][:8]
    chunks = stream(client, stop=[stop])
    assert text_of(chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_stream_with_their_text(client: OpenAI) -> None:
    chunks = stream(client, logprobs=True, top_logprobs=2)
    tokens = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for token in choice.logprobs.content
    ]
    assert len(tokens) == 8
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == text_of(chunks)
    expected = whole(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [token.token for token in tokens] == [token.token for token in expected]


def test_accumulator_of_the_sdk(client: OpenAI) -> None:
    text = whole(client).choices[0].message.content
    # The SDK's helper takes an answer that ends by its length for a failure.
    options = {**BASE, "stop": text[8:12], "logprobs": True}
    with client.chat.completions.stream(**options) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    expected = client.chat.completions.create(**options)
    assert "".join(deltas) == final.choices[0].message.content == expected.choices[0].message.content
    assert final.choices[0].finish_reason == expected.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert expected.choices[0].logprobs is not None
    tokens = [token.token for token in final.choices[0].logprobs.content or []]
    assert tokens == [token.token for token in expected.choices[0].logprobs.content or []]


def test_streaming_response_of_the_sdk(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(**BASE, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert lines[-1].strip() == "data: [DONE]"


def test_events_on_the_wire(http: httpx.Client) -> None:
    body = {**BASE, "stream": True, "max_tokens": 3}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        raw = response.read().decode()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
    events = [event for event in raw.split("\n\n") if event]
    assert raw.endswith("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        json.loads(event.removeprefix("data: "), parse_constant=pytest.fail)


def test_leaving_early_stops_the_worker(client: OpenAI, worker: Served) -> None:
    with client.chat.completions.create(
        **{**BASE, "max_tokens": 400}, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        for _, _ in zip(chunks, range(3), strict=False):
            pass
    wait_until_idle(worker)
    assert whole(client, max_tokens=1).usage.completion_tokens == 1


def test_wrong_request_fails_before_the_stream_begins(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**BASE, "stream": True, "temperature": 9})
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()["error"]["param"] == "temperature"
