"""A chat's answers as OpenAI's bodies: `chat.completion`, and the chunks of a stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from worker.server.answers import AnswerPlan, ReadAnswer
from worker.server.choice import Choice, Delta
from worker.server.exchange import EventStream, Exchange
from worker.server.generation import Generation
from worker.server.logprobs import chat_logprobs, prompt_logprobs
from worker.server.refusals import StreamUsage
from worker.server.schemas import ChatRequest
from worker.server.state import ServerState
from worker.text.answer import Part
from worker.text.tokenizer import Tokenizer


async def send_chat(
    state: ServerState,
    exchange: Exchange,
    request: ChatRequest,
    generation: Generation,
    plan: AnswerPlan | None,
    tokenizer: Tokenizer,
    lead: str,
) -> None:
    """Answer with all choices, whole; `lead`: text that every answer begins with."""
    as_ids = bool(request.return_tokens_as_token_ids)
    read: list[ReadAnswer] = []
    if plan is None:
        answers = await generation.collect()
        messages = [{"role": "assistant", "content": answer.text, "refusal": None} for answer in answers]
        reasons: list[str | None] = [answer.finish_reason for answer in answers]
    else:
        read = [ReadAnswer(plan) for _ in range(generation.params.n)]
        answers, messages = await _collect(generation, read)
        reasons = [reader.finish_reason(answer.finish_reason) for reader, answer in zip(read, answers)]
    for message in messages if lead else ():
        message["content"] = lead + (message["content"] or "")
    body = {
        **_head(state, generation, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(answer, tokenizer, generation.params, as_ids=as_ids),
                "finish_reason": reason,
                "stop_reason": answer.stop_reason,
                **({"token_ids": answer.token_ids} if request.return_token_ids else {}),
            }
            for index, (answer, message, reason) in enumerate(zip(answers, messages, reasons))
        ],
        "usage": _usage(generation, plan, read),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = generation.prompts[0]
    width = request.prompt_logprobs
    if width is not None:
        # Of a long prompt this takes a while: other answers go on meanwhile.
        entries = await asyncio.to_thread(generation.prompt_logprobs, 0)
        body["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, entries, tokenizer, width)
    await exchange.json(body)


async def _collect(
    generation: Generation, read: list[ReadAnswer]
) -> tuple[list[Delta], list[dict[str, Any]]]:
    """All answers, and their messages."""
    answers = [Delta() for _ in read]
    parts: list[list[Part]] = [[] for _ in read]
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for choice, delta in step:
                answers[choice.index].add(delta)
                parts[choice.index] += read[choice.index].push(delta)
    return answers, [reader.message(own) for reader, own in zip(read, parts)]


async def stream_chat(
    state: ServerState,
    exchange: Exchange,
    request: ChatRequest,
    generation: Generation,
    plan: AnswerPlan | None,
    tokenizer: Tokenizer,
    usage: StreamUsage,
    lead: str,
) -> None:
    """Answer with chunks, as they come; `lead`: text that every answer begins with."""
    head = _head(state, generation, "chat.completion.chunk")
    params = generation.params
    read = [ReadAnswer(plan) for _ in range(params.n)] if plan is not None else []
    as_ids = bool(request.return_tokens_as_token_ids)
    greeted: set[int] = set()
    untold: dict[int, list[int]] = {}  # tokens whose text is held back

    def chunk(choice: Choice, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        body = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {**head, "choices": [body], **usage.of_chunk(generation, choice.index)}

    def chunks(choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        made = []
        if choice.index not in greeted:
            # Not before the first token: clients take the first chunk for it when they time.
            greeted.add(choice.index)
            made.append(chunk(choice, {"role": "assistant", "content": ""}))
            if request.return_token_ids:
                made[0]["prompt_token_ids"] = generation.prompts[0]
            if lead:
                made.append(chunk(choice, {"content": lead}))
        reason: str | None = delta.finish_reason
        if plan is None:
            bodies = [{"content": delta.text}] if delta.text else []
        else:
            answer = read[choice.index]
            bodies = answer.deltas(answer.push(delta))
            reason = answer.finish_reason(reason)
        if delta.logprobs:  # also of text that is held back
            logprobs = chat_logprobs(delta, tokenizer, params, as_ids=as_ids)
            made.append(chunk(choice, bodies[0] if bodies else {"content": ""}, logprobs=logprobs))
            bodies = bodies[1:]
        made += [chunk(choice, body) for body in bodies]
        if reason is not None:
            made.append(chunk(choice, {}, finish_reason=reason, stop_reason=delta.stop_reason))
        if request.return_token_ids:
            untold.setdefault(choice.index, []).extend(delta.token_ids)
            if made:
                made[-1]["choices"][0]["token_ids"] = untold.pop(choice.index)
        return made

    await exchange.start_stream(EventStream())
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            ready = [item for choice, delta in step for item in chunks(choice, delta)]
            if ready:
                await exchange.write(*ready)
    last = [{**head, "choices": [], "usage": _usage(generation, plan, read)}] if usage.last else []
    await exchange.end_stream(*last)


def _head(state: ServerState, generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": state.model_name,
        "system_fingerprint": state.fingerprint,
    }


def _usage(generation: Generation, plan: AnswerPlan | None, read: list[ReadAnswer]) -> dict[str, object]:
    body = generation.usage().body()
    if plan is not None and plan.thinking is not None:
        tokens = sum(answer.reasoning_tokens for answer in read)
        body["completion_tokens_details"] = {"reasoning_tokens": tokens}
    return body
