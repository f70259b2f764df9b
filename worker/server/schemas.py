"""Request bodies, decoded and checked by msgspec: types here, bounds in SamplingParams.

Unknown fields are ignored, null is as good as absent, a wrong type is a 400 with the field's path as `param`.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from contracts.errors import bad_request

MAX_PROMPTS = 1024
MAX_TEMPLATE_VARIABLES = 65_536  # bytes of JSON
MAX_MESSAGES = 16384
MAX_TOOLS = 128
MAX_TOOLS_SIZE = 262_144  # bytes of JSON
MAX_SALT = 256
MAX_PRIORITY = 1_000_000

# What other servers take and this one doesn't: refused when set, since an answer that leaves it out misleads.
NOT_OFFERED = {
    "prompt_embeds": "prompts are texts or token ids",
    "use_beam_search": "tokens are drawn one by one; n gives several answers",
    "logits_processors": "a request can't bring code; logit_bias, allowed_token_ids, bad_words and penalties "
    "change what is drawn",
    "structural_tag": "structured_outputs has json, regex, choice and grammar",
}

Prompt = str | list[str | int | list[int]]


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
    prompt_embeds: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    structural_tag: Any = None
    guided_json: msgspec.Raw = msgspec.Raw()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


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
    functions: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()


class CompletionRequest(Sampling, kw_only=True):
    prompt: Prompt
    logprobs: int | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class GenerateRequest(Sampling, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    model_name: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


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


class AbortRequest(msgspec.Struct, kw_only=True):
    request_ids: list[str] | None = None


class NamesRequest(msgspec.Struct, kw_only=True):
    names: list[str]


T = TypeVar("T")

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode(body: bytes, type: type[T], within: str = "") -> T:
    """The request in `body`. ApiError 400: not JSON, or a field of the wrong type, named in `param`.

    `within`: the field that `body` is the value of, where that is read apart.
    """
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), within) from error
    except RecursionError:
        raise bad_request("The request's body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request's body is not valid JSON: {error}", code="invalid_json") from error


def template_variables(raw: msgspec.Raw) -> dict[str, Any]:
    """What `chat_template_kwargs` holds. It is looked at apart, so that its size can be limited first:
    millions of nested lists would keep the process busy for seconds."""
    if not raw:
        return {}
    if len(memoryview(raw)) > MAX_TEMPLATE_VARIABLES:
        raise bad_request(
            f"chat_template_kwargs may have at most {MAX_TEMPLATE_VARIABLES} bytes", "chat_template_kwargs"
        )
    try:
        return msgspec.json.decode(raw, type=dict[str, Any] | None) or {}
    except (msgspec.ValidationError, RecursionError):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs") from None


def _wrong_type(message: str, within: str) -> Exception:
    found = _PATH.search(message)
    path = found["path"].removesuffix("[...]") if found else ""
    if within:
        path = f"{within}.{path}" if path and path[0] != "[" else within + path
    text = message[: found.start()] if found else message
    missing = _MISSING.match(text)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{path} is missing.", path)
    where = path or "The request's body"
    return bad_request(f"{where} has the wrong type or value: {text}", path or None)
