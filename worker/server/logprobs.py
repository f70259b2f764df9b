"""Log-probabilities in OpenAI's two shapes. Strict JSON knows no infinity, so they end at MIN_LOGPROB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from worker.ipc.messages import TokenLogprob
from worker.params import SamplingParams
from worker.server.choice import Delta, LoggedToken
from worker.text.output import token_logprob_bytes
from worker.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


def clamp(logprob: float) -> float:
    """A number that JSON can carry: not below MIN_LOGPROB, which also stands for NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(
    delta: Delta, tokenizer: Tokenizer, params: SamplingParams, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat: the bytes of `content`, joined, are the text. `as_ids`: a token is
    written as its number, as `token_id:5`."""
    if params.logprobs is None:
        return None
    hide_special = params.skip_special_tokens
    return {
        "content": [_chat_token(token, tokenizer, hide_special, as_ids) for token in delta.logprobs],
        "refusal": None,
    }


def _chat_token(token: LoggedToken, tokenizer: Tokenizer, hide_special: bool, as_ids: bool) -> dict[str, Any]:
    def alternative(other: int, logprob: float) -> dict[str, Any]:
        text, data = token_logprob_bytes(tokenizer, other, hide_special)
        return {"token": _name(other) if as_ids else text, "logprob": clamp(logprob), "bytes": data}

    taken = token.logprob
    return {
        "token": _text(taken.token_id, None if as_ids else tokenizer),
        "logprob": clamp(taken.logprob),
        "bytes": list(token.data),
        "top_logprobs": [alternative(other, logprob) for other, logprob in taken.top],
    }


def completion_logprobs(
    delta: Delta, tokenizer: Tokenizer | None, params: SamplingParams, *, start: int = 0
) -> dict[str, list[Any]] | None:
    """`choices[].logprobs` of a completion; its text begins at `start`. `top_logprobs` has the token taken
    even if it is not likely. Without a tokenizer, tokens are written as their numbers."""
    if params.logprobs is None:
        return None
    return {
        "text_offset": [start + token.offset for token in delta.logprobs],
        "token_logprobs": [clamp(token.logprob.logprob) for token in delta.logprobs],
        "tokens": [_text(token.logprob.token_id, tokenizer) for token in delta.logprobs],
        "top_logprobs": [
            _alternatives(token.logprob, tokenizer, params.logprobs) for token in delta.logprobs
        ],
    }


def echoed_logprobs(
    entries: Sequence[TokenLogprob | None],
    prompt: Sequence[int],
    offsets: Sequence[int],
    tokenizer: Tokenizer | None,
    params: SamplingParams,
) -> dict[str, list[Any]] | None:
    """The same for a prompt that is echoed: null for its first token, which nothing comes before."""
    width = params.logprobs
    if width is None:
        return None
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if entry is None else clamp(entry.logprob) for entry in entries],
        "tokens": [_text(token, tokenizer) for token in prompt],
        "top_logprobs": [
            None if entry is None else _alternatives(entry, tokenizer, width) for entry in entries
        ],
    }


def _alternatives(taken: TokenLogprob, tokenizer: Tokenizer | None, width: int) -> dict[str, float]:
    # Parts of different characters can have one text; the likelier, which comes first, keeps it.
    found: dict[str, float] = {}
    for other, logprob in (*taken.top[:width], (taken.token_id, taken.logprob)):
        found.setdefault(_text(other, tokenizer), clamp(logprob))
    return found


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    return _name(token) if tokenizer is None else tokenizer.token_text(token)


def _name(token: int) -> str:
    return f"token_id:{token}"


def prompt_logprobs(
    entries: Iterable[TokenLogprob | None], tokenizer: Tokenizer | None, width: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own first, then the `width` likeliest."""

    def described(entry: TokenLogprob) -> dict[str, Any]:
        found: dict[str, Any] = {}
        likeliest = ((token, value, rank) for rank, (token, value) in enumerate(entry.top[:width], 1))
        for token, value, rank in ((entry.token_id, entry.logprob, entry.rank), *likeliest):
            text = None if tokenizer is None else tokenizer.token_text(token)
            found.setdefault(str(token), {"logprob": clamp(value), "rank": rank, "decoded_token": text})
        return found

    return [None if entry is None else described(entry) for entry in entries]


def native_logprobs(delta: Delta) -> list[dict[str, Any]]:
    """Log-probabilities by token id, for the native routes."""
    return [native_entry(token.logprob) for token in delta.logprobs]


def native_entry(entry: TokenLogprob) -> dict[str, Any]:
    """One token's."""
    return {
        "token_id": entry.token_id,
        "logprob": clamp(entry.logprob),
        "rank": entry.rank,
        "top": [{"token_id": other, "logprob": clamp(logprob)} for other, logprob in entry.top],
    }
