"""POST /v1/responses."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from typing import Any

import msgspec

from contracts.errors import bad_request
from worker.params import ParamError, SamplingParams, StructuredOutputs
from worker.server.answers import AnswerPlan, ReadAnswer, formed, plan_answers
from worker.server.chat_prompt import render_chat, with_effort
from worker.server.choice import Delta
from worker.server.decoding import decode, template_variables
from worker.server.exchange import Exchange
from worker.server.fitting import longest_prompt
from worker.server.generation import Generation, check_sequences
from worker.server.logprobs import chat_logprobs
from worker.server.responses_input import ResponsesRequest, TextFormat, messages_of, refusal_of
from worker.server.responses_output import Event, OutputItems
from worker.server.sampling import sampling_params
from worker.server.state import ServerState
from worker.server.structured import form_field, with_form
from worker.server.text_model import TextModel
from worker.server.tools import ToolUse, check_calls, flat_tools, tool_use, with_tools
from worker.text.tokenizer import Tokenizer

_LOGPROBS = "message.output_text.logprobs"


async def responses(state: ServerState, exchange: Exchange) -> None:
    """Answer a list of items with items, whole or as typed events. Nothing is stored."""
    started = time.monotonic()
    request = decode(exchange.body, ResponsesRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    refusal = refusal_of(request)
    if refusal is not None:
        raise refusal
    tools = tool_use(flat_tools(request.tools), request.tool_choice, request.parallel_tool_calls)
    params, asked_by = _params(request, tools, text)
    await check_calls(state, tools, params, asked_by)
    check_sequences(state, 1, params.n)
    effort = request.reasoning.effort if request.reasoning is not None else None
    variables = with_effort(template_variables(request.chat_template_kwargs), effort)
    prompt = await render_chat(text, messages_of(request), tools=tools, variables=variables, param="input")
    tokens = await text.encode(
        prompt, param="input", add_special_tokens=False, limit=longest_prompt(params, info)
    )
    plan = plan_answers(text, tools, prompt, None) or AnswerPlan(text, None, None)
    generation = Generation(
        state,
        [tokens],
        formed(params, plan),
        request,
        param="input",
        continuation=False,
        external_id=exchange.request_id,
        account=exchange.account,
        service_class=exchange.service_class,
        trace=exchange.trace,
        id_prefix="resp_",
        started=started,
        patience=exchange.patience,
        form_field=asked_by if params.structured_outputs is not None else None,
        shown=plan.shown,
    )
    response = _Response(state, request, tools, generation, plan, text.need_tokenizer("input"))
    try:
        generation.submit()
        await (_stream if request.stream else _whole)(exchange, response)
    finally:
        generation.close()


def _params(request: ResponsesRequest, tools: ToolUse | None, text: TextModel) -> tuple[SamplingParams, str]:
    """The parameters, and the field that asks for the form in them, if there is one."""
    wanted = request.top_logprobs is not None or _LOGPROBS in (request.include or ())
    names = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
    logprobs = (request.top_logprobs or 0) if wanted else None
    params = sampling_params(request, max_tokens=request.max_output_tokens, logprobs=logprobs, names=names)
    form = _form(request)
    if form is not None and not (tools is not None and tools.forced):
        return with_form(request, params, form, "text.format"), "text.format.schema"
    return with_tools(request, params, tools, text), form_field(request) or "tools"


def _form(request: ResponsesRequest) -> StructuredOutputs | None:
    """What `text.format` makes of the answer."""
    format = request.text.format if request.text is not None else None
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return StructuredOutputs(json_object=True)
    if format.schema is None:
        raise bad_request("text.format.schema is missing", "text.format.schema")
    try:
        return StructuredOutputs(json=json.dumps(format.schema))
    except ParamError as error:
        raise bad_request(f"text.format.schema: {error}", "text.format.schema") from error


class _Response:
    """One response: what was asked, and the items so far."""

    def __init__(
        self,
        state: ServerState,
        request: ResponsesRequest,
        tools: ToolUse | None,
        generation: Generation,
        plan: AnswerPlan,
        tokenizer: Tokenizer,
    ) -> None:
        self.generation = generation
        self._asked = _asked(state, request, generation)
        self._tokenizer = tokenizer
        self._answer = ReadAnswer(plan)
        self._output = OutputItems(plan.new_call_id)
        self._status = "in_progress"
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text isn't there yet

    def push(self, delta: Delta) -> list[Event]:
        """The events that `delta` brings; with the last one the response is complete, or incomplete."""
        parts = self._answer.push(delta)
        logprobs = chat_logprobs(delta, self._tokenizer, self.generation.params)
        if logprobs is not None:
            self._logprobs += logprobs["content"]
        events = self._output.push(parts, self._logprobs)
        if events:
            self._logprobs = []
        if delta.finish_reason is None:
            return events
        self._status = "incomplete" if delta.finish_reason == "length" else "completed"
        return [*events, *self._output.finish(self._status), self.event()]

    def event(self, kind: str | None = None) -> Event:
        """The event that carries the response as it is now."""
        return {"type": f"response.{kind or self._status}", "response": self.body()}

    def body(self) -> dict[str, Any]:
        done = self._status != "in_progress"
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._asked,
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "incomplete_details": cut,
            "output": self._output.items if done else [],
            "usage": self._usage() if done else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _asked(state: ServerState, request: ResponsesRequest, generation: Generation) -> dict[str, Any]:
    """The part of a response that says what was asked for."""
    params = generation.params
    format = request.text.format if request.text is not None else None
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "model": state.model_name,
        "error": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": params.logprobs or 0,
        "text": {"format": msgspec.to_builtins(format or TextFormat(type="text"))},
        "tool_choice": request.tool_choice or "auto",
        "tools": msgspec.json.decode(request.tools) or [] if request.tools else [],
        "truncation": "disabled",
        "user": request.user,
    }


async def _whole(exchange: Exchange, response: _Response) -> None:
    async with aclosing(response.generation.steps()) as steps:
        async for ((_, delta),) in steps:
            response.push(delta)
    await exchange.json(response.body())


async def _stream(exchange: Exchange, response: _Response) -> None:
    await exchange.start_stream(TypedEvents())
    begun = False
    async with aclosing(response.generation.steps()) as steps:
        async for ((_, delta),) in steps:
            first = [] if begun else [response.event("created"), response.event("in_progress")]
            events = [*first, *response.push(delta)]
            begun = True
            if events:
                await exchange.write(*events)
    await exchange.end_stream()


class TypedEvents:
    """Server-sent events with names and sequence numbers, ended by `[DONE]` as all streams are here."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self) -> None:
        self._number = 0

    def frame(self, value: Any) -> bytes:
        if "type" not in value:  # an error's body
            value = {**value["error"], **value, "type": "error"}
        data = msgspec.json.encode({**value, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), data)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"
