"""JSON schemas as parts of a larger one: what they refer to moves along."""

from __future__ import annotations

from typing import Any, Final

_MAPS: Final = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)  # name to schema
_VALUES: Final = ("const", "enum", "default", "examples")  # no schemas, whatever they look like


def moved(schema: Any, place: str) -> Any:
    """A copy of `schema` for `place` (a JSON pointer) in another one: its references to itself lead there.
    RecursionError when it is nested too deeply."""
    if isinstance(schema, list):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS and isinstance(value, dict):
        return {name: moved(one, place) for name, one in value.items()}
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return f"#{place}{value[1:]}"
    return moved(value, place)
