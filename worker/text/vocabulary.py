"""Sampling parameters held to a model's vocabulary and context, before the engine sees them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from worker.params import ParamError, SamplingParams
from worker.text.tokenizer import Tokenizer


def fit(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Iterable[int]
) -> SamplingParams:
    """The parameters as the engine takes them: bad words as tokens. Ids from `vocab_size` on are never
    sampled; `end_token_ids` end an answer, beside the request's own stop tokens.

    ParamError: an id outside the vocabulary, bad words without a tokenizer, or no token that could come.
    """
    if not (params.logit_bias or params.allowed_token_ids or params.bad_words or params.bad_words_token_ids):
        return params
    if params.bad_words:
        sequences = (*params.bad_words_token_ids, *_sequences(params.bad_words, tokenizer))
        params = msgspec.structs.replace(params, bad_words=(), bad_words_token_ids=sequences)
    _check("logit_bias", params.logit_bias, vocab_size)
    _check("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for sequence in params.bad_words_token_ids:
        _check("bad_words_token_ids", sequence, vocab_size)
    if params.allowed_token_ids:
        ends = set() if params.ignore_eos else set(end_token_ids)
        _check_something_is_left(params, ends.union(params.stop_token_ids))
    return params


def truncate(tokens: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` keeps. ParamError when that is more than the context
    holds."""
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return tokens
    if wanted > max_model_len:
        raise ParamError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or from 1 to max_model_len ({max_model_len}), not {wanted}",
        )
    if wanted == -1:
        answer = 1 if params.max_tokens is None else params.max_tokens
        wanted = max(1, max_model_len - answer)
    return tokens[-wanted:]


def _sequences(words: Iterable[str], tokenizer: Tokenizer | None) -> Iterable[tuple[int, ...]]:
    """Each word as tokens, as it is at the start of a text and after a space (vLLM's `bad_words`)."""
    if tokenizer is None:
        raise ParamError("bad_words", "bad_words needs a tokenizer, and this model came without one")
    spellings = (text for word in words for text in (word.lstrip(), " " + word.lstrip()))
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return dict.fromkeys(sequence for sequence in encoded if sequence)


def _check(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise ParamError(name, f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}")


def _check_something_is_left(params: SamplingParams, ends: set[int]) -> None:
    left = set(params.allowed_token_ids or ())
    left -= {sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1}
    if not left:
        raise ParamError("allowed_token_ids", "allowed_token_ids has no token that bad_words lets come")
    if params.min_tokens and not left - ends:
        raise ParamError(
            "allowed_token_ids",
            "allowed_token_ids has only tokens that end the answer, which min_tokens "
            f"({params.min_tokens}) keeps from coming first",
        )
