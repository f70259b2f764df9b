"""SamplingParams from a request's fields; out of bounds is a 400 that names the field as the client does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from contracts.errors import bad_request
from worker.params import ParamError, SamplingParams
from worker.server.schemas import MAX_PRIORITY, MAX_SALT, NOT_OFFERED, Sampling
from worker.server.structured import form_of

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "skip_special_tokens",
)  # fmt: skip


def sampling_params(
    request: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The request's parameters; absent and null fields keep SamplingParams' defaults.

    `names` maps a parameter to the field it came from where the two differ. ApiError 400 when out of bounds.
    """
    _check_extras(request)
    values: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    values["logprobs"] = logprobs
    values["logit_bias"] = _logit_bias(request.logit_bias) if request.logit_bias else None
    values["structured_outputs"] = form_of(request)
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingParams(max_tokens=max_tokens, **given)
    except ParamError as error:
        field = (names or {}).get(error.param, error.param)
        raise bad_request(str(error).replace(error.param, field, 1), field) from error


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise bad_request("The keys of logit_bias must be token ids.", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _check_extras(request: Sampling) -> None:
    for name in NOT_OFFERED:
        value = getattr(request, name)
        if value is not None and value is not False and value != []:
            raise bad_request(f"{name} is not supported; leave it out", name)
    check_scheduling(request.cache_salt, request.priority)


def check_scheduling(cache_salt: str | None, priority: int | None) -> None:
    """ApiError 400 for what is out of bounds."""
    if cache_salt is not None and len(cache_salt) > MAX_SALT:
        raise bad_request(f"cache_salt may have at most {MAX_SALT} characters", "cache_salt")
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise bad_request(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", "priority")
