"""Log-probabilities in OpenAI's two shapes. Strict JSON knows no infinity, so they end at MIN_LOGPROB."""

from __future__ import annotations

from typing import Any

from worker.params import SamplingParams
from worker.server.choice import Delta, LoggedToken
from worker.text.output import token_logprob_bytes
from worker.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


def clamp(logprob: float) -> float:
    """A number that JSON can carry: not below MIN_LOGPROB, which also stands for NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(delta: Delta, tokenizer: Tokenizer, params: SamplingParams) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat: the bytes of `content`, joined, are the text."""
    if params.logprobs is None:
        return None
    hide_special = params.skip_special_tokens
    return {
        "content": [_chat_token(token, tokenizer, hide_special) for token in delta.logprobs],
        "refusal": None,
    }


def _chat_token(token: LoggedToken, tokenizer: Tokenizer, hide_special: bool) -> dict[str, Any]:
    def alternative(other: int, logprob: float) -> dict[str, Any]:
        text, data = token_logprob_bytes(tokenizer, other, hide_special)
        return {"token": text, "logprob": clamp(logprob), "bytes": data}

    taken = token.logprob
    return {
        "token": tokenizer.token_text(taken.token_id),
        "logprob": clamp(taken.logprob),
        "bytes": list(token.data),
        "top_logprobs": [alternative(other, logprob) for other, logprob in taken.top],
    }


def completion_logprobs(
    delta: Delta, tokenizer: Tokenizer | None, params: SamplingParams
) -> dict[str, Any] | None:
    """`choices[].logprobs` of a completion. `top_logprobs` has the token taken even if it is not likely."""
    if params.logprobs is None:
        return None
    return {
        "text_offset": [token.offset for token in delta.logprobs],
        "token_logprobs": [clamp(token.logprob.logprob) for token in delta.logprobs],
        "tokens": [_text(token.logprob.token_id, tokenizer) for token in delta.logprobs],
        "top_logprobs": [_alternatives(token, tokenizer) for token in delta.logprobs],
    }


def _alternatives(token: LoggedToken, tokenizer: Tokenizer | None) -> dict[str, float]:
    taken = token.logprob
    # Parts of different characters can have one text; the likelier, which comes first, keeps it.
    found: dict[str, float] = {}
    for other, logprob in (*taken.top, (taken.token_id, taken.logprob)):
        found.setdefault(_text(other, tokenizer), clamp(logprob))
    return found


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    """Without a tokenizer a token's text is its number, as `token_id:5`."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def native_logprobs(delta: Delta) -> list[dict[str, Any]]:
    """Log-probabilities by token id, for the native routes."""
    return [
        {
            "token_id": token.logprob.token_id,
            "logprob": clamp(token.logprob.logprob),
            "rank": token.logprob.rank,
            "top": [{"token_id": other, "logprob": clamp(logprob)} for other, logprob in token.logprob.top],
        }
        for token in delta.logprobs
    ]
