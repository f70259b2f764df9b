"""SamplingParams from a request's fields; out of bounds is a 400 that names the field as the client does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from contracts.errors import bad_request
from worker.params import MAX_LOGIT_BIAS, ParamError, SamplingParams
from worker.server.exchange import MAX_REQUEST_ID, usable_name
from worker.server.not_offered import check_offered
from worker.server.schemas import MAX_PRIORITY, MAX_SALT, Sampling
from worker.server.structured import form_of

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip


def sampling_params(
    request: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The request's parameters; absent and null fields keep SamplingParams' defaults.

    `echo`: the answer begins with the prompt, with log-probabilities where the answer has some. `names` maps
    a parameter to the field it came from where the two differ. ApiError 400 when out of bounds.
    """
    _check_extras(request)
    field_of = names or {}
    if max_tokens == 0 and not echo:
        field = field_of.get("max_tokens", "max_tokens")
        raise bad_request(
            f"{field} must be at least 1, not 0 (which only /v1/completions takes, with echo)", field
        )
    values: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    values["logprobs"] = logprobs
    values["prompt_logprobs"] = request.prompt_logprobs
    if echo:
        values["prompt_logprobs"] = _for_echo(request.prompt_logprobs, logprobs, max_tokens)
    values["logit_bias"] = _logit_bias(request.logit_bias) if request.logit_bias else None
    values["structured_outputs"] = form_of(request)
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingParams(max_tokens=max_tokens, **given)
    except ParamError as error:
        field = field_of.get(error.param, error.param)
        raise bad_request(str(error).replace(error.param, field, 1), field) from error


def _for_echo(wanted: int | None, logprobs: int | None, max_tokens: int | None) -> int | None:
    """Alternatives for the prompt's tokens: as many as somebody asks for. Without an answer, 0 at least."""
    if wanted is not None and wanted < 0:
        return wanted  # out of bounds, whatever else is asked for
    given = [count for count in (wanted, logprobs, 0 if max_tokens == 0 else None) if count is not None]
    return max(given, default=None)


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}", "logit_bias"
        )
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise bad_request("The keys of logit_bias must be token ids.", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _check_extras(request: Sampling) -> None:
    check_offered(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request("best_of other than n is not supported; all n answers are returned", "best_of")
    if request.request_id is not None:
        check_request_id(request.request_id)
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs can't be streamed; leave out stream, or prompt_logprobs", "prompt_logprobs"
        )
    check_scheduling(request.cache_salt, request.priority)


def check_request_id(name: str) -> None:
    """ApiError 400 for what can't be a request's id, which goes into headers and logs."""
    if usable_name(name) is None:
        raise bad_request(
            f"request_id must have 1 to {MAX_REQUEST_ID} visible ASCII characters, without spaces",
            "request_id",
        )


def check_scheduling(cache_salt: str | None, priority: int | None) -> None:
    """ApiError 400 for what is out of bounds."""
    if cache_salt is not None and len(cache_salt) > MAX_SALT:
        raise bad_request(f"cache_salt may have at most {MAX_SALT} characters", "cache_salt")
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise bad_request(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", "priority")
