"""Request bodies: types here, bounds in SamplingParams; decoding.py checks and decodes them.

Unknown fields are ignored, null is as good as absent, a wrong type is a 400 with the field's path as `param`.
Fields of type Any are those that not_offered.py refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from worker.server.not_offered import EMBEDDINGS_NOT_OFFERED, NOT_OFFERED, NotOffered

MAX_PROMPTS = 1024
MAX_MESSAGES = 16384
MAX_TOOLS = 128
MAX_TOOLS_SIZE = 262_144  # bytes of JSON
MAX_SALT = 256
MAX_PRIORITY = 1_000_000

Prompt = str | list[str | int | list[int]]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SchemaFormat(msgspec.Struct, kw_only=True):
    name: str
    schema: msgspec.Raw = msgspec.Raw()
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: SchemaFormat | None = None


class StructuredFields(msgspec.Struct, kw_only=True):
    json: msgspec.Raw = msgspec.Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that every generating route takes at its top level."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = NOT_OFFERED

    model: str | None = None
    model_name: str | None = None
    stream: bool | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: msgspec.Raw = msgspec.Raw()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    best_of: int | None = None
    prompt_embeds: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    logits_processors: Any = None
    structural_tag: Any = None
    guided_whitespace_pattern: Any = None
    logprob_token_ids: Any = None
    truncation_side: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    watermarking: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class FlatTool(Function, kw_only=True):
    type: Literal["function"]


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(Sampling, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    chat_template: Any = None
    documents: Any = None
    return_prompt_text: Any = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: Prompt
    logprobs: int | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    suffix: Any = None
    add_special_tokens: bool | None = None


class GenerateRequest(Sampling, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    not_offered: ClassVar[Mapping[str, NotOffered]] = EMBEDDINGS_NOT_OFFERED

    model: str | None = None
    model_name: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    use_activation: bool | None = None
    prompt: Any = None
    messages: Any = None
    padding: Any = None
    stream: Any = None
    n: Any = None
    truncate_prompt_tokens: Any = None
    embed_dtype: Any = None
    endianness: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    model_name: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    model_name: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


# An operator's word that isn't known is an error: ignored, a misspelt request_ids would end all requests.
class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    request_ids: list[str] | None = None


class NamesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    names: list[str]
