"""A worker whose model says what a test wants, in chats with tools and reasoning; and what clients make of
its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.worker import chat_templates
from tests.worker.chat_templates import text_side
from tests.worker.fake_engine import INFO, MODEL, FakeEngine, events, in_process, make_state, say, strict_json
from worker.server.state import ServerState

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": PARAMETERS},
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ASK = [{"role": "user", "content": "Weather in Köln?"}]
COLOGNE = '{"city": "Köln"}'
ROOMY = msgspec.structs.replace(INFO, max_model_len=8192, num_pages=1025)
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {COLOGNE}}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def worker(answer: str, template: str = chat_templates.QWEN3, **engine: Any) -> ServerState:
    state = make_state(FakeEngine(say(answer), info=ROOMY, **engine))
    state.text = text_side(template)
    return state


def engine_of(state: ServerState) -> FakeEngine:
    assert isinstance(state.engine, FakeEngine)
    return state.engine


def prompt_of(state: ServerState) -> str:
    assert state.text
    assert state.text.tokenizer
    tokens = engine_of(state).submitted[0].prompt_token_ids
    return state.text.tokenizer.decode(tokens, skip_special_tokens=False)


async def post(state: ServerState, **fields: Any) -> Any:
    async with in_process(state) as client:
        body = {"model": MODEL, "messages": ASK, **fields}
        return await client.post("/v1/chat/completions", json=body)


async def chat(state: ServerState, **fields: Any) -> Any:
    answer = await post(state, **fields)
    assert answer.status_code == 200, answer.text
    return strict_json(answer.content)


async def stream(state: ServerState, **fields: Any) -> list[Any]:
    answer = await post(state, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text)
    assert chunks.pop() == "[DONE]"
    return chunks


def joined(chunks: list[Any], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """(message, finish_reason) as a client puts them together, strict about the deltas of calls."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content", "reasoning"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["function"]["arguments"] == ""
                    assert call["type"] == "function"
                    message["tool_calls"].append(
                        {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                    )
                else:
                    assert set(call) == {"index", "function"}
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


def plain_calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in calls]
