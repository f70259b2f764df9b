"""Objects of a JSON schema that list their properties take no others, unless the schema says they do.

By the standard they would take any. Who writes a schema for an answer means what it lists, OpenAI's strict
schemas must say so, and vLLM takes it for granted; a small model left free adds properties without end.
"""

from __future__ import annotations

from typing import Any

# What says which other properties there may be, here or in another place that has a part in the same object.
_SPEAKS_OF_OTHERS = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "$ref")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # from names to schemas
_LISTS = ("prefixItems", "anyOf", "oneOf")
_ONE = ("items", "additionalProperties")


def close_objects(schema: Any) -> None:
    """Adds `"additionalProperties": false` in place, where nothing can be meant by its absence. A schema in
    which several schemas have a part in one object (`allOf`, `$ref` beside properties) is left as it is."""
    if not _is_composed(schema):
        _close(schema)


def _is_composed(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(_is_composed(one) for one in schema)
    if not isinstance(schema, dict):
        return False
    composed = "allOf" in schema or ("$ref" in schema and "properties" in schema)
    return composed or any(_is_composed(one) for one in schema.values())


def _close(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    lists_properties = isinstance(schema.get("properties"), dict)
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            for one in schema[name].values():
                _close(one)
    for name in _LISTS:
        # The properties of an object with alternatives are those of both.
        if isinstance(schema.get(name), list) and not (lists_properties and name != "prefixItems"):
            for one in schema[name]:
                _close(one)
    for name in _ONE:
        _close(schema.get(name))
    if lists_properties and _SPEAKS_OF_OTHERS.isdisjoint(schema):
        schema["additionalProperties"] = False
