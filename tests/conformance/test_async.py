"""The asynchronous client: the same answers, many at once, and leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.conformance.conftest import MODEL, Served, wait_until_idle

pytestmark = pytest.mark.model


def chat(content: str = "Name three colours.", **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **options}


async def test_answer(async_client: AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(**chat())
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_stream_equals_the_whole(async_client: AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(**chat())
    chunks = [chunk async for chunk in await async_client.chat.completions.create(**chat(), stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


async def test_accumulator(async_client: AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(**chat())
    text = whole.choices[0].message.content
    assert text
    async with async_client.chat.completions.stream(**chat(stop=text[6:9])) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[6:9])]


async def test_many_at_once_get_what_each_gets_alone(async_client: AsyncOpenAI) -> None:
    questions = [f"What is {i} plus {i}?" for i in range(6)]

    async def ask(question: str) -> Any:
        answer = await async_client.chat.completions.create(**chat(question))
        return answer.choices[0].message.content

    together = await asyncio.gather(*map(ask, questions))
    assert together == [await ask(question) for question in questions]
    assert len(set(together)) > 1


async def test_completion(async_client: AsyncOpenAI) -> None:
    answer = await async_client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4)
    assert answer.object == "text_completion"


async def test_models(async_client: AsyncOpenAI) -> None:
    assert [model.id async for model in async_client.models.list()] == [MODEL]


async def test_raw_response(async_client: AsyncOpenAI) -> None:
    raw = await async_client.chat.completions.with_raw_response.create(**chat(max_tokens=1))
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.role == "assistant"


async def test_error(async_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await async_client.chat.completions.create(**chat() | {"model": "nobody"})
    assert caught.value.code == "model_not_found"


async def test_timeout_of_the_client_stops_the_worker(async_client: AsyncOpenAI, worker: Served) -> None:
    endless = chat(max_tokens=400, extra_body={"ignore_eos": True})
    with pytest.raises(openai.APITimeoutError):
        await async_client.chat.completions.create(**endless, timeout=0.5)
    await asyncio.to_thread(wait_until_idle, worker)


async def test_cancelled_stream_stops_the_worker(async_client: AsyncOpenAI, worker: Served) -> None:
    started = asyncio.Event()

    async def read() -> None:
        endless = chat(max_tokens=400, extra_body={"ignore_eos": True})
        async for _ in await async_client.chat.completions.create(**endless, stream=True):
            started.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, worker)
