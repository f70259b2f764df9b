"""Answers with tool calls or reasoning in them: from text to OpenAI's message, whole and in pieces."""

from __future__ import annotations

import secrets
import string
import uuid
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from worker.params import SamplingParams
from worker.server.choice import Delta
from worker.server.text_model import TextModel
from worker.server.tools import ToolUse
from worker.text.answer import AnswerReader, CallArguments, CallStart, Content, Part, Reasoning
from worker.text.reasoning import CLOSE, OPEN, ReasoningTokens, ThinkReader, ThinkState

_ID_ALPHABET: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers of one request are to be read.

    Args:
        text: the model's text side.
        tools: what may be called.
        thinking: what an answer begins with; None: this model doesn't reason.
        show_reasoning: give it to the client.
    """

    text: TextModel
    tools: ToolUse | None
    thinking: ThinkState | None
    show_reasoning: bool = True

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that must be in the text, since they tell what is what."""
        tokenizer, calls = self.text.tokenizer, self.text.calls
        words = calls.words if self.tools is not None and calls is not None else ()
        if self.thinking is not None:
            words += (OPEN, CLOSE)
        ids = [tokenizer.token_id(word) for word in words] if tokenizer is not None else []
        return frozenset(token for token in ids if token is not None)

    def new_call_id(self) -> str:
        calls = self.text.calls
        if calls is not None and calls.short_ids:
            return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
        return f"call_{uuid.uuid4().hex}"


def formed(params: SamplingParams, plan: AnswerPlan | None) -> SamplingParams:
    """The same; a form that the answer must have begins after the reasoning, where there is any."""
    form = params.structured_outputs
    if form is None or plan is None or plan.thinking not in ("undecided", "inside"):
        return params
    form = msgspec.structs.replace(form, thinking="open" if plan.thinking == "inside" else "may")
    return msgspec.structs.replace(params, structured_outputs=form)


def plan_answers(
    text: TextModel, tools: ToolUse | None, prompt: str, include_reasoning: bool | None
) -> AnswerPlan | None:
    """None where answers are plain text: neither has the model reasoning, nor the request tools."""
    if tools is None and text.reasoning is None:
        return None
    thinking = text.reasoning.first_state(prompt) if text.reasoning is not None else None
    return AnswerPlan(text, tools, thinking, include_reasoning is not False)


class ReadAnswer:
    """One answer while it grows: `push` what the engine brings, and give the parts to `deltas` (of a stream),
    or all of them to `message`."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._ids: list[str] = []  # of the calls so far
        self._thinking = ThinkReader(plan.thinking) if plan.thinking is not None else None
        tools = plan.tools
        calls = tools.reader(plan.text.calls) if tools is not None else None
        self._reader = AnswerReader(self._thinking, calls, tools.most if tools is not None else None)
        self._counted: ReasoningTokens | None = None
        tokenizer = plan.text.tokenizer
        if plan.thinking is not None and tokenizer is not None:
            self._counted = ReasoningTokens(
                plan.thinking, tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
            )

    @property
    def reasoning_tokens(self) -> int:
        return self._counted.count if self._counted is not None else 0

    def push(self, delta: Delta) -> list[Part]:
        """What `delta` brings."""
        parts = self._reader.push(delta.text)
        if self._counted is not None and self._thinking is not None:
            self._counted.push(delta.token_ids, self._thinking.state)
        if delta.finish_reason is not None:
            parts += self._reader.finish()
        return [part for part in parts if self._plan.show_reasoning or not isinstance(part, Reasoning)]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason that the client sees: an answer that ended by itself after a call ended for the call,
        unless the client itself has named the function."""
        tools = self._plan.tools
        chosen = tools is None or tools.named is None
        return "tool_calls" if reason == "stop" and chosen and self._reader.called else reason

    def deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        """`delta` objects of a stream."""
        made: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Content(text):
                    made.append({"content": text})
                case Reasoning(text):
                    made.append({"reasoning_content": text, "reasoning": text})
                case CallStart(name):
                    self._ids.append(self._plan.new_call_id())
                    function = {"name": name, "arguments": ""}
                    call = {"id": self._ids[-1], "type": "function", "function": function}
                    made.append({"tool_calls": [{"index": len(self._ids) - 1, **call}]})
                case CallArguments(text):
                    call = {"function": {"arguments": text}}
                    made.append({"tool_calls": [{"index": len(self._ids) - 1, **call}]})
        return made

    def message(self, parts: list[Part]) -> dict[str, Any]:
        """`message` of a whole answer: the deltas, joined."""
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": self._plan.new_call_id(), "type": "function", "function": function})
                case CallArguments(text):
                    calls[-1]["function"]["arguments"] += text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if not content and (calls or reasoning):
            message["content"] = None
        if calls:
            message["tool_calls"] = calls
        if self._plan.thinking is not None:
            message["reasoning_content"] = message["reasoning"] = reasoning or None
        return message
