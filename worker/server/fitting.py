"""Whether a request fits the model and the engine's memory; what doesn't is a 400 that says what would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from contracts.errors import bad_request
from worker.ipc.messages import EngineInfo
from worker.params import ParamError, SamplingParams
from worker.server.schemas import Prompt
from worker.server.text_model import TextModel, context_too_long
from worker.text import vocabulary

MAX_PROMPT_ALTERNATIVES = 1 << 20  # in an answer: some 60 MB of JSON
MAX_ECHOED = 1 << 20  # tokens in an answer
MAX_MASKED = 1 << 20  # tokens in a request to the engine
MAX_PROMPT_TOKENS = 1 << 22  # of all answers: each brings its prompt to the engine


def fit_params(params: SamplingParams, info: EngineInfo, text: TextModel) -> SamplingParams:
    """The parameters as the engine takes them; see worker.text.vocabulary."""
    ends = text.tokenizer.eos_token_ids if text.tokenizer else ()
    if params.stop:
        text.need_tokenizer("stop")
    if params.bad_words:
        text.need_tokenizer("bad_words")
    try:
        return vocabulary.fit(params, text.tokenizer, info.vocab_size, (*ends, *info.eos_token_ids))
    except ParamError as error:
        raise bad_request(str(error), error.param) from error


def one_kind(prompts: Prompt, param: str) -> list[str | list[int]]:
    """Prompts as a list: of texts, or of lists of token ids. `prompts` isn't empty."""
    if isinstance(prompts, str):
        return [prompts]
    kinds = set(map(type, prompts))
    if len(kinds) > 1:
        raise bad_request(f"{param} mixes strings, token ids and lists of token ids; send one kind", param)
    # Millions of ids may be too many, which is for others to say: they aren't copied.
    return cast(list[str | list[int]], [prompts] if kinds == {int} else prompts)


def longest_prompt(params: SamplingParams, info: EngineInfo) -> int | None:
    """Tokens that a prompt may have before it is cut; None: any number."""
    return info.max_model_len if params.truncate_prompt_tokens is None else None


def fit_prompts(
    prompts: Sequence[list[int]], params: SamplingParams, info: EngineInfo, param: str
) -> Sequence[list[int]]:
    """The prompts, cut to what `truncate_prompt_tokens` keeps of them; `param` is the field that became them.
    ApiError 400 when they, or what is asked about them, are too much for one request."""
    if params.truncate_prompt_tokens is not None:
        try:
            prompts = [vocabulary.truncate(prompt, params, info.max_model_len) for prompt in prompts]
        except ParamError as error:
            raise bad_request(str(error), error.param) from error
    tokens = sum(map(len, prompts)) * params.n
    if tokens > MAX_PROMPT_TOKENS:
        raise bad_request(
            f"The prompts of all answers have {tokens} tokens together; at most {MAX_PROMPT_TOKENS} are "
            "taken in one request. Send fewer prompts, or ask for fewer answers (n).",
            param,
        )
    if params.prompt_logprobs is not None:
        alternatives = sum(map(len, prompts)) * (params.prompt_logprobs + 1) * params.n
        if alternatives > MAX_PROMPT_ALTERNATIVES:
            raise bad_request(
                f"The log-probabilities of these prompts would be {alternatives} numbers; at most "
                f"{MAX_PROMPT_ALTERNATIVES} are told in one answer. Send fewer prompts, or ask for fewer "
                "alternatives.",
                "prompt_logprobs",
            )
    masked = len(params.allowed_token_ids or ()) + sum(map(len, params.bad_words_token_ids))
    if masked * len(prompts) * params.n > MAX_MASKED:
        raise bad_request(
            f"allowed_token_ids and bad_words have {masked} tokens; for {len(prompts) * params.n} answers in "
            f"one request they may have at most {MAX_MASKED // (len(prompts) * params.n)}",
            "allowed_token_ids" if params.allowed_token_ids else "bad_words",
        )
    return prompts


def check_echo(prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Each answer brings its prompt again: not too many of too long ones."""
    tokens = sum(map(len, prompts)) * params.n
    if tokens > MAX_ECHOED:
        raise bad_request(
            f"echo would repeat {tokens} tokens; at most {MAX_ECHOED} are repeated in one answer", "echo"
        )


def answer_length(prompt: list[int], wanted: int | None, info: EngineInfo, param: str) -> int:
    """Most tokens the answer may have; `wanted` when it fits, all that is left when it is None. `param` is
    the field that became the prompt."""
    if not prompt:
        raise bad_request(f"{param} is empty: at least one token is needed", param)
    length = len(prompt)
    least = length + (1 if wanted is None else wanted)
    if length > info.max_model_len:
        raise context_too_long(str(length), info.max_model_len, param)
    if length == info.max_model_len and wanted != 0:
        raise context_too_long(f"{length}, which leaves none for an answer", info.max_model_len, param)
    if max(prompt) >= info.vocab_size or min(prompt) < 0:
        raise bad_request(f"token ids in {param} must be from 0 to {info.vocab_size - 1}", param)
    if least > info.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {info.max_model_len} tokens, but {least} are "
            f"asked for ({length} in the prompt, {wanted} in the answer); shorten the prompt or lower "
            "max_tokens.",
            param,
            "context_length_exceeded",
        )
    capacity = (info.num_pages - 1) * info.page_size  # page 0 is never used
    if least > capacity:
        raise bad_request(
            f"This worker's KV cache holds {capacity} tokens, but {least} are asked for "
            f"({length} in the prompt); shorten the prompt, lower max_tokens, or start the worker with more "
            "--kv-cache-memory-bytes.",
            param,
            "context_length_exceeded",
        )
    return min(info.max_model_len, capacity) - length if wanted is None else wanted
