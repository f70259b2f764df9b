"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from contracts.errors import bad_request
from worker.server.completion_body import CompletionBody
from worker.server.decoding import decode
from worker.server.exchange import EventStream, Exchange
from worker.server.fitting import check_echo, longest_prompt, one_kind
from worker.server.generation import Generation, check_sequences
from worker.server.refusals import StreamUsage, check_stream_options
from worker.server.sampling import sampling_params
from worker.server.schemas import CompletionRequest, Prompt
from worker.server.state import ServerState
from worker.server.structured import check_form, form_field
from worker.server.text_model import TextModel

DEFAULT_MAX_TOKENS = 16


async def completions(state: ServerState, exchange: Exchange) -> None:
    """Continue one or more prompts, whole or as server-sent events."""
    started = time.monotonic()
    request = decode(exchange.body, CompletionRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    usage = check_stream_options(request.stream_options, bool(request.stream))
    params = sampling_params(
        request, max_tokens=request.max_tokens, logprobs=request.logprobs, echo=bool(request.echo)
    )
    form = form_field(request) or ""
    await check_form(state, params, form)
    prompts = _split(request.prompt)
    check_sequences(state, len(prompts), params.n)
    tokens = []
    for prompt in prompts:
        special, limit = request.add_special_tokens, longest_prompt(params, info)
        tokens.append(await prompt_tokens(text, prompt, add_special_tokens=special, limit=limit))
        if len(prompts) > 1:
            await asyncio.sleep(0)  # a thousand prompts: other requests go on meanwhile
    generation = Generation(
        state,
        tokens,
        params,
        request,
        param="prompt",
        continuation=True,
        external_id=exchange.request_id,
        account=exchange.account,
        service_class=exchange.service_class,
        trace=exchange.trace,
        id_prefix="cmpl-",
        started=started,
        patience=exchange.patience,
        form_field=form if params.structured_outputs is not None else None,
        default_length=DEFAULT_MAX_TOKENS,
    )
    if request.echo:
        check_echo(generation.prompts, params)
    body = CompletionBody(request, generation, text.tokenizer, prompts)
    try:
        generation.submit()
        if request.stream:
            await _stream(state, exchange, generation, body, usage)
        else:
            await _whole(state, exchange, generation, body)
    finally:
        generation.close()


async def prompt_tokens(
    text: TextModel, prompt: str | list[int], *, add_special_tokens: bool | None, limit: int | None
) -> list[int]:
    """Token ids of one prompt, which may be token ids already."""
    if isinstance(prompt, list):
        return prompt
    if not prompt:
        raise bad_request("prompt is empty: at least one token is needed", "prompt")
    return await text.encode(
        prompt, param="prompt", add_special_tokens=add_special_tokens is not False, limit=limit
    )


def _split(prompt: Prompt) -> list[str | list[int]]:
    """The prompts of a request: one string, one list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is empty: at least one token is needed", "prompt")
    return one_kind(prompt, "prompt")


async def _whole(
    state: ServerState, exchange: Exchange, generation: Generation, body: CompletionBody
) -> None:
    answers = await generation.collect()
    head = _head(state, generation)

    def whole() -> dict[str, Any]:
        choices = [body.choice(index, answer) for index, answer in enumerate(answers)]
        return {**head, "choices": choices, "usage": generation.usage().body()}

    # What is said of long prompts takes seconds to write: other answers go on meanwhile.
    await exchange.json(await asyncio.to_thread(whole) if body.long else whole())


async def _stream(
    state: ServerState, exchange: Exchange, generation: Generation, body: CompletionBody, usage: StreamUsage
) -> None:
    head = _head(state, generation)
    await exchange.start_stream(EventStream())
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            choices = await asyncio.to_thread(body.pieces, step) if body.long else body.pieces(step)
            ready = [
                {**head, "choices": [choice], **usage.of_chunk(generation, choice["index"])}
                for choice in choices
            ]
            if ready:
                await exchange.write(*ready)
    last = [{**head, "choices": [], "usage": generation.usage().body()}] if usage.last else []
    await exchange.end_stream(*last)


def _head(state: ServerState, generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": state.model_name,
        "system_fingerprint": state.fingerprint,
    }
