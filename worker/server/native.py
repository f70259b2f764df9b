"""The worker's own routes: /generate, /generate_stream, /tokenize, /detokenize."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from contracts.errors import bad_request
from worker.server.chat_prompt import render_chat
from worker.server.choice import Delta
from worker.server.completions import DEFAULT_MAX_TOKENS, prompt_tokens
from worker.server.decoding import decode, template_variables
from worker.server.exchange import Exchange, JsonLines
from worker.server.fitting import longest_prompt
from worker.server.generation import Generation
from worker.server.logprobs import native_entry, native_logprobs
from worker.server.sampling import sampling_params
from worker.server.schemas import DetokenizeRequest, GenerateRequest, TokenizeRequest
from worker.server.state import ServerState
from worker.server.structured import check_form, form_field
from worker.server.tools import chat_tools, tool_use


async def generate(state: ServerState, exchange: Exchange) -> None:
    """One prompt, one answer: text and token ids. With `stream: true`, as /generate_stream."""
    await _generate(state, exchange, stream=False)


async def generate_stream(state: ServerState, exchange: Exchange) -> None:
    """The same as one JSON object a line while tokens come; the last has finish_reason and usage."""
    await _generate(state, exchange, stream=True)


async def _generate(state: ServerState, exchange: Exchange, *, stream: bool) -> None:
    started = time.monotonic()
    request = decode(exchange.body, GenerateRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    params = sampling_params(request, max_tokens=request.max_tokens, logprobs=request.logprobs)
    form = form_field(request) or ""
    await check_form(state, params, form)
    if params.n != 1:
        raise bad_request("n must be 1 here; /v1/completions gives several answers", "n")
    tokens = await prompt_tokens(
        text,
        request.prompt,
        add_special_tokens=request.add_special_tokens,
        limit=longest_prompt(params, info),
    )
    generation = Generation(
        state,
        [tokens],
        params,
        request,
        param="prompt",
        continuation=True,
        external_id=exchange.request_id,
        account=exchange.account,
        service_class=exchange.service_class,
        trace=exchange.trace,
        id_prefix="gen-",
        started=started,
        patience=exchange.patience,
        form_field=form if params.structured_outputs is not None else None,
        default_length=DEFAULT_MAX_TOKENS,
    )
    try:
        generation.submit()
        if stream or request.stream:
            await _stream(state, exchange, generation)
        else:
            (answer,) = await generation.collect()
            await exchange.json({**_head(state, generation), **_answer(answer, generation)})
    finally:
        generation.close()


async def _stream(state: ServerState, exchange: Exchange, generation: Generation) -> None:
    head = _head(state, generation)
    await exchange.start_stream(JsonLines())
    last: dict[str, Any] = {}
    async with aclosing(generation.steps()) as steps:
        async for ((_, delta),) in steps:
            line = {**head, **_answer(delta, generation)}
            if delta.finish_reason is not None:
                last = line
            else:
                await exchange.write(line)
    await exchange.end_stream(last)


def _head(state: ServerState, generation: Generation) -> dict[str, Any]:
    return {"id": generation.id, "model": state.model_name}


def _answer(delta: Delta, generation: Generation) -> dict[str, Any]:
    body: dict[str, Any] = {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "logprobs": None if generation.params.logprobs is None else native_logprobs(delta),
        "finish_reason": delta.finish_reason,
    }
    if generation.params.prompt_logprobs is not None:
        entries = generation.prompt_logprobs(0)
        body["prompt_logprobs"] = [None if entry is None else native_entry(entry) for entry in entries]
    if delta.finish_reason is not None:
        body["stop_reason"] = delta.stop_reason
        body["usage"] = generation.usage().body()
    return body


async def tokenize(state: ServerState, exchange: Exchange) -> None:
    """Token ids of a text (`prompt`) or of a chat (`messages`)."""
    request = decode(exchange.body, TokenizeRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    limit = None  # counting the tokens of a prompt that is too long is what people come here for
    if request.messages is not None:
        prompt = await render_chat(
            text,
            request.messages,
            tools=tool_use(chat_tools(request.tools), None, None),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=template_variables(request.chat_template_kwargs),
        )
        special = request.add_special_tokens is True  # the template has put them there already
        tokens = await text.encode(prompt, param="messages", add_special_tokens=special, limit=limit)
    elif request.prompt is not None:
        tokens = await text.encode(
            request.prompt,
            param="prompt",
            add_special_tokens=request.add_special_tokens is not False,
            limit=limit,
        )
    else:
        raise bad_request("prompt is missing (or messages, for a chat)", "prompt")
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
    if request.return_token_strs:
        answer["token_strs"] = await text.token_texts(tokens, param="return_token_strs")
    await exchange.json(answer)


async def detokenize(state: ServerState, exchange: Exchange) -> None:
    """The text of token ids."""
    request = decode(exchange.body, DetokenizeRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, _, text = state.ready()
    skip = bool(request.skip_special_tokens)
    prompt = await text.decode(request.tokens, param="tokens", skip_special_tokens=skip)
    await exchange.json({"prompt": prompt})
