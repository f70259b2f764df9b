"""Chats with a server of one scripted engine."""

from __future__ import annotations

from typing import Any

from tests.worker.fake_engine import MODEL, events, in_process, strict_json
from worker.server.state import ServerState

HELLO = [{"role": "user", "content": "Hi"}]


async def chat(state: ServerState, **fields: Any) -> Any:
    async with in_process(state) as client:
        answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.content)


async def stream(state: ServerState, **fields: Any) -> list[Any]:
    async with in_process(state) as client:
        answer = await client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "stream": True, **fields}
        )
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)
