"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from contracts.errors import bad_request
from worker.params import SamplingParams
from worker.server.choice import Choice, Delta
from worker.server.exchange import EventStream, Exchange
from worker.server.generation import Generation, check_sequences
from worker.server.logprobs import chat_logprobs
from worker.server.refusals import check_stream_options, refuse_unsupported_format
from worker.server.sampling import sampling_params
from worker.server.schemas import MAX_MESSAGES, ChatRequest, Message, decode, template_variables
from worker.server.state import ServerState
from worker.server.text_model import TextModel
from worker.text.tokenizer import Tokenizer

_OFF_LOOP_MESSAGES = 64


async def chat_completions(state: ServerState, exchange: Exchange) -> None:
    """Answer a chat, whole or as server-sent events."""
    started = time.monotonic()
    request = decode(exchange.body, ChatRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    _refuse_unsupported(request)
    usage_wanted = check_stream_options(request.stream_options, bool(request.stream))
    params = _params(request)
    check_sequences(state, 1, params.n)
    tokens = await chat_prompt(
        text,
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        variables=template_variables(request.chat_template_kwargs),
        limit=info.max_model_len,
    )
    generation = Generation(
        state,
        [tokens],
        params,
        request,
        param="messages",
        continuation=False,
        external_id=exchange.request_id,
        account=exchange.account,
        service_class=exchange.service_class,
        trace=exchange.trace,
        id_prefix="chatcmpl-",
        started=started,
    )
    try:
        generation.submit()
        if request.stream:
            await _stream(state, exchange, generation, usage_wanted, text.need_tokenizer("messages"))
        else:
            await _whole(state, exchange, generation, text.need_tokenizer("messages"))
    finally:
        generation.close()


async def chat_prompt(
    text: TextModel,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    variables: dict[str, Any],
    limit: int | None,
) -> list[int]:
    """Token ids of a chat. ApiError 400 when it can't become a prompt or is far over `limit` tokens."""
    if not messages:
        raise bad_request("messages is empty: at least one message is needed", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages may hold at most {MAX_MESSAGES} messages", "messages")
    _check_parts(messages)
    plain: list[dict[str, Any]] = [msgspec.to_builtins(message) for message in messages]
    render = partial(text.render, plain, add_generation_prompt=add_generation_prompt, variables=variables)
    # Long conversations take milliseconds to render: other streams go on meanwhile.
    prompt = render() if len(plain) <= _OFF_LOOP_MESSAGES else await asyncio.to_thread(render)
    return await text.encode(prompt, param="messages", add_special_tokens=False, limit=limit)


def _check_parts(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{i}].content[{j}]"
            if part.type not in ("text", "refusal"):
                raise bad_request(
                    f"{where}.type is {part.type[:50]!r}; this model reads text only", f"{where}.type"
                )
            if (part.text if part.type == "text" else part.refusal) is None:
                raise bad_request(f"{where}.{part.type} is missing", f"{where}.{part.type}")


def _refuse_unsupported(request: ChatRequest) -> None:
    refuse_unsupported_format(request.response_format)
    if request.tools and request.tool_choice != "none":
        raise bad_request(
            'tools are not supported yet; send tool_choice: "none", or leave tools out', "tools"
        )
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise bad_request(
            "tool_choice asks for a call, but there are no tools (nor are they supported yet); leave it out",
            "tool_choice",
        )
    if request.functions:
        raise bad_request("functions are not supported", "functions")


def _params(request: ChatRequest) -> SamplingParams:
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            "max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens"
        )
    names = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return sampling_params(
        request,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        names=names,
    )


async def _whole(
    state: ServerState, exchange: Exchange, generation: Generation, tokenizer: Tokenizer
) -> None:
    answers = await generation.collect()
    await exchange.json(
        {
            "id": generation.id,
            "object": "chat.completion",
            "created": generation.created,
            "model": state.model_name,
            "system_fingerprint": state.fingerprint,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "logprobs": chat_logprobs(answer, tokenizer, generation.params),
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                }
                for index, answer in enumerate(answers)
            ],
            "usage": generation.usage().body(),
        }
    )


async def _stream(
    state: ServerState,
    exchange: Exchange,
    generation: Generation,
    usage_wanted: bool,
    tokenizer: Tokenizer,
) -> None:
    head: dict[str, Any] = {
        "id": generation.id,
        "object": "chat.completion.chunk",
        "created": generation.created,
        "model": state.model_name,
        "system_fingerprint": state.fingerprint,
    }
    tail: dict[str, Any] = {"usage": None} if usage_wanted else {}

    def chunk(choice: Choice, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        body = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {**head, "choices": [body], **tail}

    def chunks(choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        made = []
        if choice.index not in greeted:
            # Not before the first token: clients take the first chunk for it when they time.
            greeted.add(choice.index)
            made.append(chunk(choice, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta, tokenizer, generation.params)
            made.append(chunk(choice, {"content": delta.text}, logprobs=logprobs))
        if delta.finish_reason is not None:
            reasons = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            made.append(chunk(choice, {}, **reasons))
        return made

    greeted: set[int] = set()
    await exchange.start_stream(EventStream())
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            ready = [item for choice, delta in step for item in chunks(choice, delta)]
            if ready:
                await exchange.write(*ready)
    last = [{**head, "choices": [], "usage": generation.usage().body()}] if usage_wanted else []
    await exchange.end_stream(*last)
