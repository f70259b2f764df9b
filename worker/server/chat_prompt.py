"""From a chat to the prompt that the model continues."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from contracts.errors import bad_request
from worker.server.schemas import MAX_MESSAGES, ChatRequest, Message, ReasoningEffort
from worker.server.text_model import TextModel
from worker.server.tools import ToolUse
from worker.text.template import PART_SEPARATOR, TemplateError, up_to_mark, with_mark

_OFF_LOOP_MESSAGES = 64

T = TypeVar("T")


async def render_chat(
    text: TextModel,
    messages: Sequence[Message],
    *,
    tools: ToolUse | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    variables: dict[str, Any],
    param: str = "messages",
) -> str:
    """The prompt of a chat. ApiError 400 when it can't become one; `param`: the field that has it.

    `add_generation_prompt`: by default, unless `continue_final_message`: then it ends in the last message.
    """
    if continue_final_message and add_generation_prompt:
        raise bad_request(
            "continue_final_message goes on with the last message, add_generation_prompt begins a new one; "
            "leave one of them out",
            "continue_final_message",
        )
    if not messages:
        raise bad_request(f"{param} is empty: at least one message is needed", param)
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages may hold at most {MAX_MESSAGES} messages", "messages")
    _check_parts(messages)
    if tools is not None:
        _check_that_tools_show(text, tools)
    plain = [_for_template(message) for message in messages]
    mark = secrets.token_hex(16)
    if continue_final_message:
        plain[-1] = _going_on(with_mark, plain[-1], mark)
    render = partial(
        text.render,
        plain,
        tools=tools.tools if tools is not None else (),
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        variables=variables,
        param=param,
    )
    # Long conversations take milliseconds to render: other streams go on meanwhile.
    prompt = render() if len(plain) <= _OFF_LOOP_MESSAGES else await asyncio.to_thread(render)
    return _going_on(up_to_mark, prompt, mark) if continue_final_message else prompt


def echoed(request: ChatRequest) -> str:
    """What `echo` puts before an answer: the text of the last message, where the answer is of the same role
    or goes on in it."""
    if not request.echo:
        return ""
    last = request.messages[-1]
    follows = request.add_generation_prompt is not False and not request.continue_final_message
    if follows and last.role != "assistant":
        return ""
    if isinstance(last.content, str) or last.content is None:
        return last.content or ""
    return PART_SEPARATOR.join(part.text or part.refusal or "" for part in last.content)


def with_effort(variables: dict[str, Any], effort: ReasoningEffort | None) -> dict[str, Any]:
    """Variables of the chat template: an effort is told to those that know it, `none` is also Qwen3's
    `enable_thinking: false`."""
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if effort == "none":
        variables.setdefault("enable_thinking", False)
    return variables


def _going_on(function: Callable[[T, str], T], given: T, mark: str) -> T:
    try:
        return function(given, mark)
    except TemplateError as error:
        raise bad_request(f"continue_final_message: {error}", "continue_final_message") from error


def _for_template(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if not message.tool_calls:
        plain.pop("tool_calls", None)  # templates ask whether it is there, not whether it is empty
    reasoning = plain.pop("reasoning", None)
    if reasoning is not None:
        plain.setdefault("reasoning_content", reasoning)
    return plain


def _check_that_tools_show(text: TextModel, tools: ToolUse) -> None:
    if text.template is not None and not (text.shows_tools or text.tells_of_tools):
        raise bad_request(
            "This model's chat template has no place for tools; start the worker with a --chat-template that "
            "has, or with --tool-call-parser hermes to tell the model of them, or leave tools out.",
            "tools",
        )
    if text.calls is None and not tools.forced:
        raise bad_request(
            "How this model writes tool calls isn't known; start the worker with --tool-call-parser, or use "
            "tool_choice 'required' or a function's name.",
            "tools",
        )


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
