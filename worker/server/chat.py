"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from contracts.errors import bad_request
from worker.params import SamplingParams
from worker.server.answers import formed, plan_answers
from worker.server.chat_answer import send_chat, stream_chat
from worker.server.chat_prompt import echoed, render_chat, with_effort
from worker.server.decoding import decode, template_variables
from worker.server.exchange import Exchange
from worker.server.fitting import longest_prompt
from worker.server.generation import Generation, check_sequences
from worker.server.refusals import check_stream_options
from worker.server.sampling import sampling_params
from worker.server.schemas import ChatRequest
from worker.server.state import ServerState
from worker.server.structured import form_field
from worker.server.text_model import TextModel
from worker.server.tools import ToolUse, chat_tools, check_calls, tool_use, with_tools


async def chat_completions(state: ServerState, exchange: Exchange) -> None:
    """Answer a chat, whole or as server-sent events."""
    started = time.monotonic()
    request = decode(exchange.body, ChatRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    usage = check_stream_options(request.stream_options, bool(request.stream))
    tools = tool_use(chat_tools(request.tools), request.tool_choice, request.parallel_tool_calls)
    params = _params(request, tools, text)
    form = form_field(request) or "tools"
    await check_calls(state, tools, params, form)
    check_sequences(state, 1, params.n)
    prompt = await render_chat(
        text,
        request.messages,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=with_effort(template_variables(request.chat_template_kwargs), request.reasoning_effort),
    )
    lead = echoed(request)
    tokens = await text.encode(
        prompt,
        param="messages",
        add_special_tokens=request.add_special_tokens is True,  # the template has put them there already
        limit=longest_prompt(params, info),
    )
    plan = plan_answers(text, tools, prompt, request.include_reasoning)
    generation = Generation(
        state,
        [tokens],
        formed(params, plan),
        request,
        param="messages",
        continuation=request.continue_final_message is True,
        external_id=exchange.request_id,
        account=exchange.account,
        service_class=exchange.service_class,
        trace=exchange.trace,
        id_prefix="chatcmpl-",
        started=started,
        shown=plan.shown if plan is not None else (),
        patience=exchange.patience,
        form_field=form if params.structured_outputs is not None else None,
    )
    try:
        generation.submit()
        tokenizer = text.need_tokenizer("messages")
        if request.stream:
            await stream_chat(state, exchange, request, generation, plan, tokenizer, usage, lead)
        else:
            await send_chat(state, exchange, request, generation, plan, tokenizer, lead)
    finally:
        generation.close()


def _params(request: ChatRequest, tools: ToolUse | None, text: TextModel) -> SamplingParams:
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
    params = sampling_params(
        request,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        names=names,
    )
    return with_tools(request, params, tools, text)
