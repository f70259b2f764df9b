"""Bounds of a body's fields in the API's description: those that are checked, which types don't say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from worker.params import (
    BIAS,
    BOUNDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_CHOICE_LENGTH,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_LOGIT_BIAS,
    MAX_REGEX,
    MAX_STOP,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    TOKEN,
    Bounds,
)
from worker.server import schemas
from worker.server.exchange import MAX_REQUEST_ID
from worker.server.responses_input import INCLUDED
from worker.server.text_model import MAX_CHARS, MAX_TOKENS

Schema = dict[str, Any]
# By the JSON type of a field's value; None: of one that has any.
Limits = Mapping[str | None, Schema]

_TOKEN_IDS: Final[Schema] = {"minimum": TOKEN.low, "maximum": TOKEN.high}
_REGEX: Final[Limits] = {"string": {"minLength": 1, "maxLength": MAX_REGEX}}
_GRAMMAR: Final[Limits] = {"string": {"minLength": 1, "maxLength": MAX_GRAMMAR}}
_CHOICE: Final[Limits] = {
    "array": {
        "minItems": 1,
        "maxItems": MAX_CHOICES,
        "items": {"minLength": 1, "maxLength": MAX_CHOICE_LENGTH},
    }
}
_LIMITS: Final[Mapping[str, Limits]] = {
    "priority": {"integer": {"minimum": -schemas.MAX_PRIORITY, "maximum": schemas.MAX_PRIORITY}},
    "cache_salt": {"string": {"maxLength": schemas.MAX_SALT}},
    "request_id": {"string": {"minLength": 1, "maxLength": MAX_REQUEST_ID, "pattern": "^[!-~]+$"}},
    "messages": {"array": {"minItems": 1, "maxItems": schemas.MAX_MESSAGES}},
    "tools": {None: {"type": ["array", "null"], "maxItems": schemas.MAX_TOOLS}},
    "chat_template_kwargs": {None: {"type": ["object", "null"]}},
    "stop": {
        "string": {"minLength": 1, "maxLength": MAX_STOP_LENGTH},
        "array": {"maxItems": MAX_STOP, "items": {"minLength": 1, "maxLength": MAX_STOP_LENGTH}},
    },
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS, "items": _TOKEN_IDS}},
    "allowed_token_ids": {"array": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS, "items": _TOKEN_IDS}},
    "bad_words": {
        "array": {"maxItems": MAX_BAD_WORDS, "items": {"minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH}}
    },
    "logit_bias": {
        "object": {
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"minimum": BIAS.low, "maximum": BIAS.high},
        }
    },
    "guided_regex": _REGEX,
    "guided_grammar": _GRAMMAR,
    "guided_choice": _CHOICE,
    "regex": _REGEX,
    "grammar": _GRAMMAR,
    "choice": _CHOICE,
    "prompt": {"string": {"minLength": 1, "maxLength": MAX_CHARS}, "array": {"minItems": 1}},
    "input": {"string": {"minLength": 1, "maxLength": MAX_CHARS}, "array": {"minItems": 1}},
    "instructions": {"string": {"maxLength": MAX_CHARS}},
    "include": {"array": {"items": {"enum": list(INCLUDED)}}},
    "truncation": {"string": {"enum": ["disabled"]}},
    "dimensions": {"integer": {"minimum": 1}},
    "tokens": {"array": {"maxItems": MAX_TOKENS, "items": _TOKEN_IDS}},
}
# Of one body: where the same name has other bounds.
_OF_ONE: Final[Mapping[tuple[str, str], Limits]] = {
    ("TokenizeRequest", "prompt"): {"string": {"maxLength": MAX_CHARS}},
    ("ResponsesRequest", "input"): {
        "string": {"maxLength": MAX_CHARS}, "array": {"minItems": 1, "maxItems": schemas.MAX_MESSAGES},
    },
}  # fmt: skip
_BOUNDED_AS: Final = {
    "best_of": "n",
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}


def bound(body: str, properties: dict[str, Schema]) -> None:
    """Adds the limits to the fields of `body`, the name of its type."""
    for name, schema in properties.items():
        limits = dict(_OF_ONE.get((body, name), _LIMITS.get(name, {})))
        bounds = BOUNDS.get(_BOUNDED_AS.get(name, name))
        if bounds is not None:
            limits["integer"] = limits["number"] = _range(bounds)
        for branch in schema.get("anyOf", [schema]):
            _narrow(branch, limits.get(branch.get("type"), {}))


def _narrow(schema: Schema, limits: Schema) -> None:
    for key, value in limits.items():
        if isinstance(value, dict) and isinstance(schema.get(key), dict):
            _narrow(schema[key], value)
        else:
            schema[key] = value


def _range(bounds: Bounds) -> Schema:
    low = "exclusiveMinimum" if bounds.above else "minimum"
    return {low: bounds.low, "maximum": bounds.high}
