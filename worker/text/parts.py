"""What a tokenizer is made of, whichever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

from worker.text.pieces import Spelling


class TokenizerError(ValueError):
    """There is no usable tokenizer; the message says what was looked at and the way out."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A `tokenizers` pipeline, and what that library doesn't keep."""

    backend: Backend
    spelling: Spelling
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    chat_template: str | None
    tool_template: str | None = None  # the template for chats with tools, where that is another one
