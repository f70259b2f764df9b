"""Which objects of a schema are closed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from worker.grammar.closing import close_objects

LISTED = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**LISTED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (LISTED, CLOSED),
        ({"properties": {"x": LISTED}}, {"properties": {"x": CLOSED}, "additionalProperties": False}),
        ({"type": "array", "items": LISTED}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [LISTED]}, {"prefixItems": [CLOSED]}),
        ({"anyOf": [LISTED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"n": LISTED}, "$ref": "#/$defs/n"}, {"$defs": {"n": CLOSED}, "$ref": "#/$defs/n"}),
        ({"additionalProperties": LISTED}, {"additionalProperties": CLOSED}),
        (
            {"properties": {"properties": LISTED}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_objects_that_list_their_properties_take_no_others(schema: Any, closed: Any) -> None:
    mine = copy.deepcopy(schema)
    close_objects(mine)
    assert mine == closed
    close_objects(mine)
    assert mine == closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        [],
        {"type": "object"},
        {**LISTED, "additionalProperties": True},
        {**LISTED, "additionalProperties": {"type": "string"}},
        {**LISTED, "unevaluatedProperties": True},
        {**LISTED, "patternProperties": {"^x": {}}},
        {**LISTED, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {"allOf": [LISTED, {"properties": {"b": {}}}]},
        {"$defs": {"n": LISTED}, "$ref": "#/$defs/n", "properties": {"b": {}}},
        {"enum": [{"properties": {"a": 1}}], "const": {"properties": {}}},
    ],
)
def test_others_stay_as_they_are(schema: Any) -> None:
    mine = copy.deepcopy(schema)
    close_objects(mine)
    assert mine == schema
