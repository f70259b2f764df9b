"""Fields of OpenAI's and vLLM's that change an answer and aren't offered: refused, unless they say what is so
anyway, since an answer that leaves them out would mislead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from contracts.errors import bad_request


class NotOffered(NamedTuple):
    """`why` it isn't there, and what is; `neutral`: values that say what is so anyway, beside null, false and
    empty lists."""

    why: str
    neutral: tuple[Any, ...] = ()


_BEAMS: Final = "tokens are drawn one by one, there is no beam search; n gives several answers"
_TEXT: Final = "answers are text"
_STORE: Final = "nothing is stored, send all items"

NOT_OFFERED: Final[Mapping[str, NotOffered]] = {
    # vLLM's, on every route that generates
    "prompt_embeds": NotOffered("prompts are texts or token ids"),
    "use_beam_search": NotOffered(_BEAMS),
    "length_penalty": NotOffered(_BEAMS, (1.0,)),
    "early_stopping": NotOffered(_BEAMS),
    "logits_processors": NotOffered(
        "a request can't bring code; logit_bias, allowed_token_ids, bad_words and penalties change what is "
        "drawn"
    ),
    "structural_tag": NotOffered("structured_outputs has json, regex, choice and grammar"),
    "guided_whitespace_pattern": NotOffered(
        "between elements of a document there are up to 24 characters of white space; a grammar can say less"
    ),
    "logprob_token_ids": NotOffered("logprobs name the likeliest tokens, at most 20"),
    "truncation_side": NotOffered("truncate_prompt_tokens keeps a prompt's end", ("left",)),
    "repetition_detection": NotOffered("repetition_penalty, frequency_penalty and max_tokens bound it"),
    "thinking_token_budget": NotOffered(
        "max_tokens bounds reasoning and answer together; chat_template_kwargs switch reasoning off", (-1,)
    ),
    "watermarking": NotOffered("tokens are drawn without a mark"),
    "vllm_xargs": NotOffered("there are no extensions that would read it", ({},)),
    "kv_transfer_params": NotOffered("prompt and answer are computed by one worker"),
    "ec_transfer_params": NotOffered("prompt and answer are computed by one worker"),
    # of chats
    "functions": NotOffered("send them as tools"),
    "function_call": NotOffered("send tools and tool_choice", ("none", "auto")),
    "audio": NotOffered(_TEXT),
    "modalities": NotOffered(_TEXT, (["text"],)),
    "verbosity": NotOffered("say it in the messages; max_completion_tokens bounds an answer", ("medium",)),
    "web_search_options": NotOffered("the server searches nothing; offer a function as one of tools"),
    "chat_template": NotOffered("the worker's option --chat-template sets it for all requests"),
    "documents": NotOffered(
        'a template that reads them gets them by chat_template_kwargs: {"documents": []}'
    ),
    "return_prompt_text": NotOffered("return_token_ids gives the prompt as tokens, /detokenize their text"),
    # of chats and responses
    "moderation": NotOffered("nothing is moderated; ask a model for it in a request of its own"),
    # of responses
    "previous_response_id": NotOffered(_STORE),
    "conversation": NotOffered(_STORE),
    "background": NotOffered("leave it out; with stream: true the answer comes as it is made"),
    "background_options": NotOffered("with stream: true the answer comes as it is made"),
    "context_management": NotOffered("input that is too long is refused; shorten it"),
    "max_tool_calls": NotOffered("it bounds tools that the server runs: there are none"),
    "image": NotOffered(_TEXT),
    "access_programs": NotOffered("there are none"),
    # of completions
    "suffix": NotOffered("the models served here continue text, they don't fill in", ("",)),
}

# Of responses, where some names belong to other routes.
RESPONSES_NOT_OFFERED: Final[Mapping[str, NotOffered]] = {
    **NOT_OFFERED,
    "prompt": NotOffered("prompts aren't stored, send instructions and input"),
    "messages": NotOffered("send them as input"),
}

# Of embeddings, where some names mean something else.
EMBEDDINGS_NOT_OFFERED: Final[Mapping[str, NotOffered]] = {
    "prompt": NotOffered("send it as input"),
    "messages": NotOffered("inputs are texts or token ids; /tokenize gives the tokens of a chat"),
    "truncate_prompt_tokens": NotOffered("inputs that are too long are refused; shorten them"),
    "padding": NotOffered("inputs are taken as they are", ("do_not_pad",)),
    "stream": NotOffered("all vectors come in one answer"),
    "n": NotOffered("an input has one vector", (1,)),
    "embed_dtype": NotOffered("vectors are float32", ("float32", "float")),
    "endianness": NotOffered("base64 holds float32, little-endian", ("little", "native")),
}


@functools.cache
def refused_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of a body's fields that are refused. Its class attribute `not_offered` is one of the tables."""
    table: Mapping[str, NotOffered] = getattr(kind, "not_offered", {})
    return tuple(name for name in kind.__struct_fields__ if name in table) if table else ()


def check_offered(request: msgspec.Struct) -> None:
    """ApiError 400 naming a field of `request` that asks for what isn't there."""
    names, values_of, none = _getter(type(request))
    values = values_of(request)
    if values == none:
        return
    for name, value in zip(names, values):
        why, neutral = request.not_offered[name]  # type: ignore[attr-defined]
        if value is not None and value is not False and value != [] and value not in neutral:
            raise bad_request(f"{name} is not supported: {why}", name)


def check_offered_in(body: bytes, kind: type) -> None:
    """The same of a body that is no whole request of the type `kind`: of its fields that are refused."""
    if refused_fields(kind):
        check_offered(msgspec.json.decode(body, type=_refused_alone(kind)))


@functools.cache
def _refused_alone(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    table: Mapping[str, NotOffered] = kind.not_offered  # type: ignore[attr-defined]
    fields = [(name, Any, None) for name in refused_fields(kind)]
    return msgspec.defstruct(kind.__name__, fields, namespace={"not_offered": table})


@functools.cache
def _getter(
    kind: type[msgspec.Struct],
) -> tuple[tuple[str, ...], Callable[[msgspec.Struct], tuple[Any, ...]], tuple[None, ...]]:
    names = refused_fields(kind)
    return names, attrgetter(*names), (None,) * len(names)
