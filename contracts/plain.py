"""What is wrong with a value, in words for a person who doesn't know pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "tuple_type": "must be a list",
    "model_type": "must be a block of keys",
    "model_attributes_type": "must be a block of keys",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
}


def describe_value(detail: Mapping[str, Any]) -> str:
    """One of pydantic's errors about a value that is there: what it must be, and what it is."""
    kind, message, value = detail["type"], detail["msg"], detail["input"]
    if kind == "value_error":  # a validator of ours, which names the value
        return str(message).removeprefix("Value error, ")
    if kind in _PLAIN:
        message = _PLAIN[kind].format_map(detail.get("ctx", {}))
    if isinstance(value, (str, int, float)):
        return f"{message}, not {value!r:.100}"
    return str(message)
