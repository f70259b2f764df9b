"""The API's description against the code that it describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from starlette.routing import Route

from tests.worker.fake_engine import in_process, make_state
from worker.params import BOUNDS, ParamError, SamplingParams
from worker.server import schemas
from worker.server.app import create_app
from worker.server.not_offered import refused_fields
from worker.server.openapi import OPERATIONS, document


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document())
    return found


def test_every_route_is_described_and_nothing_else(described: dict[str, Any]) -> None:
    routes = set()
    for route in create_app(make_state()).routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        endpoint: Any = route.endpoint
        routes |= {(route.path.replace(":path", ""), method.lower()) for method in endpoint._handlers}
    routes = {(path, method) for path, method in routes if method != "head"}
    assert routes == {(path, method) for path, item in described["paths"].items() for method in item}


def test_every_field_of_a_body_is_described(described: dict[str, Any]) -> None:
    for operation in OPERATIONS:
        if operation.body is None or not issubclass(operation.body, msgspec.Struct):
            continue
        fields = {field.name for field in msgspec.structs.fields(operation.body)}
        fields -= set(refused_fields(operation.body))
        schema = described["components"]["schemas"][operation.body.__name__]
        assert set(schema["properties"]) == fields, operation.path


def test_references_lead_somewhere_and_schemas_are_schemas(described: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = set(references(described))
    assert len(found) > 20
    for reference in found:
        place = described
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def numbers(schema: dict[str, Any]) -> dict[str, Any] | None:
    branches = [
        branch for branch in schema.get("anyOf", [schema]) if branch.get("type") in ("integer", "number")
    ]
    return branches[0] if branches else None


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_bounds_are_those_that_are_checked(described: dict[str, Any], name: str) -> None:
    properties = described["components"]["schemas"]["CompletionRequest"]["properties"]
    schema = numbers(properties[name])
    assert schema is not None
    step = 1 if schema["type"] == "integer" else 1e-9
    others = {"max_tokens": 1 << 31} if name == "min_tokens" else {}
    if name == "max_tokens":
        others = {"prompt_logprobs": 0}

    def accepts(value: float) -> bool:
        try:
            SamplingParams(**{**others, name: value})
        except ParamError as error:
            return error.param != name
        return True

    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    assert accepts(low) == ("minimum" in schema)
    assert accepts(low + 2 * step)  # 0 may mean something else
    assert not accepts(low - step)
    assert accepts(schema["maximum"])
    assert not accepts(schema["maximum"] + step)


def test_chats_call_two_bounds_otherwise(described: dict[str, Any]) -> None:
    properties = described["components"]["schemas"]["ChatRequest"]["properties"]
    top = numbers(properties["top_logprobs"])
    longest = numbers(properties["max_completion_tokens"])
    assert top is not None
    assert longest is not None
    assert top["maximum"] == BOUNDS["logprobs"].high
    assert longest["maximum"] == BOUNDS["max_tokens"].high
    assert properties["messages"]["maxItems"] == schemas.MAX_MESSAGES


async def test_it_is_served(described: dict[str, Any]) -> None:
    async with in_process(make_state()) as client:
        response = await client.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        assert response.json() == described
