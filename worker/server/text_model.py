"""TextModel: tokenizer and chat template of the model served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from contracts.errors import ApiError, bad_request
from worker.config import WorkerConfig
from worker.text.calls import CALL_FORMATS, CallFormat, call_format_of
from worker.text.calls.own_prompt import with_tools
from worker.text.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from worker.text.template import ChatTemplate, TemplateError
from worker.text.tokenizer import Tokenizer
from worker.weights.source import ModelSource

MAX_CHARS = 4_000_000  # some seconds of a core; twice what the longest contexts hold
_OFF_LOOP_CHARS = 8192  # longer texts take over a millisecond or so: tokenized on a thread
MAX_TOKENS = 1_000_000  # as long as the longest contexts
_OFF_LOOP_TOKENS = 2048
Format = TypeVar("Format", CallFormat, ReasoningFormat)

_RESERVED = ("self", "messages", "tools", "add_generation_prompt")


@dataclass(slots=True)
class TextModel:
    """Text to prompts. Without a tokenizer (random weights) the model takes and gives token ids only.

    calls, reasoning: how the model writes tool calls and reasoning; None: it does not, or nobody knows how.
    tool_template: the one for chats with tools; None: the same.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None = None
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    tool_template: ChatTemplate | None = None
    longest_token: int = field(init=False)  # bytes of the longest vocabulary entry

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        lengths = (
            [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)] if tokenizer else []
        )
        self.longest_token = max(lengths, default=1)

    @classmethod
    def load(cls, source: ModelSource, config: WorkerConfig) -> TextModel:
        """Tokenizer and template as the options say. ValueError names the option or file at fault."""
        tokenizer = Tokenizer.from_source(source, config.tokenizer)
        if tokenizer is None:
            return cls(None)
        text = _read(config.chat_template) if config.chat_template else tokenizer.chat_template
        tool_text = None if config.chat_template else tokenizer.tool_template

        def compiled(text: str | None) -> ChatTemplate | None:
            return ChatTemplate(text, tokenizer.bos_token, tokenizer.eos_token) if text else None

        return cls(
            tokenizer,
            compiled(text),
            _chosen(config.tool_call_parser, CALL_FORMATS, call_format_of, tool_text or text),
            _chosen(config.reasoning_parser, REASONING_FORMATS, reasoning_format_of, text),
            compiled(tool_text),
        )

    @property
    def tells_of_tools(self) -> bool:
        """Whether tools are told of in the system message, since the template has no place for them."""
        return self.calls is not None and self.calls.own_prompt and not self.shows_tools

    @property
    def shows_tools(self) -> bool:
        """Whether a template has a place for tools."""
        template = self.tool_template or self.template
        return template is not None and template.tools is not None

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; ApiError 400 naming `param` when the model has none."""
        if self.tokenizer is None:
            raise bad_request(
                f"This model has no tokenizer, so {param} can't be used; send the prompt as token ids, "
                "or start the worker with --tokenizer.",
                param,
            )
        return self.tokenizer

    async def encode(
        self, text: str, *, param: str, add_special_tokens: bool, limit: int | None
    ) -> list[int]:
        """Token ids of `text`. ApiError 400 when it is so long that it must have more than `limit` tokens, or
        has more than MAX_CHARS characters."""
        tokenizer = self.need_tokenizer(param)
        # A token covers at most so many bytes; the factor is for normalizers that shorten (NFC: 3 to 1).
        fewest = len(text) // (4 * self.longest_token)
        if limit is not None and fewest > limit:
            raise context_too_long(f"at least {fewest}", limit, param)
        if len(text) > MAX_CHARS:
            raise bad_request(f"{param} has {len(text)} characters; at most {MAX_CHARS} are read.", param)
        if len(text) < _OFF_LOOP_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def decode(self, tokens: list[int], *, param: str, skip_special_tokens: bool) -> str:
        """The text of token ids. ApiError 400 for one that doesn't exist, or more than MAX_TOKENS."""
        tokenizer = self.need_tokenizer(param)
        if len(tokens) > MAX_TOKENS:
            raise bad_request(f"{param} has {len(tokens)} token ids; at most {MAX_TOKENS} are read.", param)
        if tokens and not (min(tokens) >= 0 and max(tokens) < tokenizer.vocab_size):
            raise bad_request(f"{param} must be token ids from 0 to {tokenizer.vocab_size - 1}", param)
        if len(tokens) < _OFF_LOOP_TOKENS:
            return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)

    async def token_texts(self, tokens: list[int], *, param: str) -> list[str]:
        """Each token's own text."""
        token_text = self.need_tokenizer(param).token_text
        if len(tokens) < _OFF_LOOP_TOKENS:
            return [token_text(token) for token in tokens]
        return await asyncio.to_thread(lambda: [token_text(token) for token in tokens])

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool,
        variables: dict[str, Any],
        param: str = "messages",
    ) -> str:
        """The chat as one prompt. ApiError 400 when the template refuses it, or there is none."""
        if self.template is None:
            raise bad_request(
                "This model has no chat template; use /v1/completions, or start the worker with "
                "--chat-template FILE.",
                param,
            )
        template = self.template
        if tools and self.tells_of_tools:
            messages, tools = with_tools(messages, tools), ()
        elif tools and self.tool_template is not None:
            template = self.tool_template
        for name in _RESERVED:
            if name in variables:
                raise bad_request(f"chat_template_kwargs may not set {name}", f"chat_template_kwargs.{name}")
        try:
            return template.render(messages, tools, add_generation_prompt=add_generation_prompt, **variables)
        except TemplateError as error:
            raise bad_request(f"The messages don't fit the chat template: {error}", param) from error


def context_too_long(tokens: str, limit: int, param: str) -> ApiError:
    return bad_request(
        f"This model's maximum context length is {limit} tokens, but the prompt has {tokens}; shorten it.",
        param,
        "context_length_exceeded",
    )


def _chosen(
    name: str, formats: Mapping[str, Format], known_by: Callable[[str], Format | None], template: str | None
) -> Format | None:
    """The format that an option names; "auto": what the chat template shows."""
    if name == "auto":
        return known_by(template) if template else None
    return formats.get(name)


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: can't be read: {error}") from error
