"""What answers look like, for the API's description; endpoints write them field by field.

A field with a default may be missing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob] | None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str | None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    error: dict[str, Any] | None
    output: list[dict[str, Any]]
    usage: ResponseUsage
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    metadata: dict[str, str]


class EmbeddingItem(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class TokenLogprobEntry(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int
    top: list[dict[str, Any]]


class Generated(msgspec.Struct, kw_only=True):
    id: str
    model: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobEntry] | None
    prompt_logprobs: list[TokenLogprobEntry | None] | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    usage: CompletionUsage


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok"]
    engine: Literal["loading", "ready"]
    draining: bool
    inflight: int
    max_num_seqs: int | None


class Readiness(msgspec.Struct, kw_only=True):
    status: Literal["loading", "ready", "draining", "failed"]
    phase: str
    done: int
    total: int
    model: str
    inflight: int
    message: str | None = None


class Version(msgspec.Struct):
    version: str


class WhoAmI(msgspec.Struct):
    slot: str
    generation: int
    model: str
    pid: int


class Draining(msgspec.Struct):
    draining: bool
    inflight: int


class Aborted(msgspec.Struct):
    aborted: int


class Reset(msgspec.Struct):
    reset: bool


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """Every error, on every route."""

    error: ErrorDetail
