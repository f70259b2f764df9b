"""The body of POST /v1/responses, and the conversation in it as a chat's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import msgspec

from contracts.errors import ApiError, bad_request
from worker.server.not_offered import NOT_OFFERED, RESPONSES_NOT_OFFERED, NotOffered
from worker.server.schemas import (
    MAX_MESSAGES,
    FunctionCall,
    Message,
    Part,
    ReasoningEffort,
    Sampling,
    ToolCall,
)

INCLUDED: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")


class InputPart(msgspec.Struct, kw_only=True):
    """A part of a message's content, of a function's output or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Any item of `input`: which fields count, `type` says; without one it is a message."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponsesRequest(Sampling, kw_only=True):
    not_offered: ClassVar[Mapping[str, NotOffered]] = RESPONSES_NOT_OFFERED

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    truncation: str | None = None
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    prompt: Any = None
    messages: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None


def messages_of(request: ResponsesRequest) -> list[Message]:
    """The conversation that `instructions` and `input` are. ApiError 400 for items that can't be served."""
    messages = [Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    if not request.input:
        raise bad_request("input is empty: at least one item is needed", "input")
    if len(request.input) > MAX_MESSAGES:
        raise bad_request(f"input may hold at most {MAX_MESSAGES} items", "input")
    return [*messages, *_Conversation(request.input).messages]


class _Conversation:
    """Items as messages: what an assistant said, thought and called in one turn is one message."""

    def __init__(self, items: Sequence[InputItem]) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None  # of the assistant, that later items may be part of
        for index, item in enumerate(items):
            self._add(item, f"input[{index}]")

    def _add(self, item: InputItem, where: str) -> None:
        kind = item.type or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            thought = _text(item.content, where + ".content", ("reasoning_text",))
            if thought:
                self._assistant("reasoning_content").reasoning_content = thought
        elif kind == "function_call":
            turn = self._assistant("call")
            call = FunctionCall(name=_need(item.name, where + ".name"), arguments=item.arguments or "{}")
            calls = [*(turn.tool_calls or ()), ToolCall(function=call, id=item.call_id, type="function")]
            turn.tool_calls = calls
        elif kind == "function_call_output":
            if item.output is None:
                raise bad_request(f"{where}.output is missing", f"{where}.output")
            text = _text(item.output, where + ".output", _TEXT_PARTS)
            call_id = _need(item.call_id, where + ".call_id")
            self._other(Message(role="tool", content=text, tool_call_id=call_id))
        else:
            raise bad_request(
                f"{where}.type is {kind[:50]!r}; served are message, function_call, function_call_output and "
                "reasoning",
                f"{where}.type",
            )

    def _add_message(self, item: InputItem, where: str) -> None:
        role = _need(item.role, where + ".role")
        if item.content is None:
            raise bad_request(f"{where}.content is missing", f"{where}.content")
        content = _content(item.content, where + ".content")
        if role == "assistant":
            self._assistant("content").content = content
        else:
            self._other(Message(role=role, content=content))  # type: ignore[arg-type]

    def _other(self, message: Message) -> None:
        self._turn = None
        self.messages.append(message)

    def _assistant(self, part: Literal["content", "reasoning_content", "call"]) -> Message:
        """The assistant's message that a further part belongs to; a new one where it can't be that."""
        turn = self._turn
        if turn is not None and part != "call":  # calls come last, content before them, reasoning first
            earlier = (turn.tool_calls, turn.content, part == "reasoning_content" and turn.reasoning_content)
            turn = None if any(earlier) else turn
        if turn is None:
            turn = self._turn = Message(role="assistant")
            self.messages.append(turn)
        return turn


def _content(content: str | list[InputPart], where: str) -> str | list[Part]:
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            parts.append(Part(type="refusal", refusal=part.refusal))
        else:
            text = _text([part], f"{where}[{index}]", _TEXT_PARTS, single=True)
            parts.append(Part(type="text", text=text))
    return parts


def _text(
    content: str | list[InputPart] | None, where: str, kinds: Sequence[str], *, single: bool = False
) -> str:
    """The text of parts; ApiError 400 for those that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        place = where if single else f"{where}[{index}]"
        if part.type not in kinds:
            raise bad_request(f"{place}.type is {part.type[:50]!r}; only text is read here", f"{place}.type")
        if part.text is None:
            raise bad_request(f"{place}.text is missing", f"{place}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _need(value: str | None, where: str) -> str:
    if not value:
        raise bad_request(f"{where} is missing", where)
    return value


def refusal_of(request: ResponsesRequest) -> ApiError | None:
    """What is asked for and not done here: an answer that leaves it out would mislead."""
    if request.max_tokens:
        return bad_request("max_tokens is not supported: send max_output_tokens", "max_tokens")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        why = NOT_OFFERED["verbosity"].why
        return bad_request(f"text.verbosity is not supported: {why}", "text.verbosity")
    if request.truncation not in (None, "disabled"):
        return bad_request("truncation must be 'disabled': input that is too long is refused", "truncation")
    for index, name in enumerate(request.include or ()):
        if name not in INCLUDED:
            return bad_request(f"include[{index}] is {name[:60]!r}, which isn't there", f"include[{index}]")
    if request.prompt_logprobs is not None:
        return bad_request(
            "prompt_logprobs have no place in a response; /v1/chat/completions tells them", "prompt_logprobs"
        )
    if request.n not in (None, 1):
        return bad_request("n must be 1 here; /v1/chat/completions gives several answers", "n")
    return None
