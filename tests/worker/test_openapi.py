"""The API's description against the code that it describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from starlette.routing import Route

from tests.worker.fake_engine import MODEL, POOLING_INFO, FakeEngine, in_process, make_state
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


NEEDED = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
}


@pytest.mark.parametrize(
    ("path", "name", "fit", "beyond"),
    [
        ("/v1/completions", "request_id", "i" * 128, "i" * 129),
        ("/v1/completions", "request_id", "~", "a b"),
        ("/v1/completions", "guided_regex", "a" * 16_384, "a" * 16_385),
        ("/v1/completions", "guided_choice", ["a"] * 1024, ["a"] * 1025),
        ("/v1/completions", "guided_choice", ["a" * 4096], ["a" * 4097]),
        ("/v1/completions", "guided_choice", ["a"], []),
        ("/v1/completions", "guided_grammar", 'start: "a"', ""),
        ("/v1/completions", "guided_grammar", 'start: "a"', "x" * 65_537),
        ("/v1/completions", "best_of", 1, 129),
        ("/v1/completions", "prompt", "x", "x" * 4_000_001),
        ("/v1/responses", "include", ["reasoning.encrypted_content"], ["other"]),
        ("/v1/responses", "truncation", "disabled", "auto"),
        ("/v1/responses", "input", "", []),
        ("/v1/responses", "tools", [], [{"type": "function", "name": f"f{i}"} for i in range(129)]),
        ("/v1/responses", "chat_template_kwargs", {}, []),
        ("/tokenize", "prompt", "", "x" * 4_000_001),
        ("/detokenize", "tokens", [0], [-1]),
        ("/v1/embeddings", "normalize", True, "yes"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_what_is_bounded_is_so_described(
    described: dict[str, Any], path: str, name: str, fit: Any, beyond: Any
) -> None:
    """Both ways: what the description allows is taken, and what it forbids is a 400."""
    content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = {**content["schema"], "components": described["components"]}
    engine = FakeEngine(info=POOLING_INFO) if path == "/v1/embeddings" else FakeEngine()
    state = make_state(engine)
    async with in_process(state) as client:
        for value, good in ((fit, True), (beyond, False)):
            body = {"model": MODEL, **NEEDED.get(path, {}), name: value}
            assert jsonschema.Draft202012Validator(schema).is_valid(body) == good
            assert (await client.post(path, json=body)).status_code == (200 if good else 400)
    if state.grammars is not None:
        state.grammars.close()


UNBOUNDED = {
    "model", "model_name", "user",  # any text; unknown names are a 404
    "prompt", "input",  # of token ids: as long as the model's context
    "tool_choice", "metadata", "stream_options",  # objects
}  # fmt: skip


def test_no_other_field_is_without_bounds(described: dict[str, Any]) -> None:
    bounds = {
        "integer": {"minimum", "exclusiveMinimum"}, "number": {"minimum", "exclusiveMinimum"},
        "string": {"maxLength", "enum"}, "array": {"maxItems"}, "object": {"maxProperties", "properties"},
    }  # fmt: skip
    found = set()
    for operation in OPERATIONS:
        if operation.body is None or operation.local:
            continue
        properties = described["components"]["schemas"][operation.body.__name__]["properties"]
        for name, schema in properties.items():
            for branch in schema.get("anyOf", [schema]):
                kind = str(branch.get("type"))
                if kind in bounds and bounds[kind].isdisjoint(branch):
                    found.add(name)
    assert found <= UNBOUNDED | {"include"}  # whose words are listed


async def test_it_is_served(described: dict[str, Any]) -> None:
    async with in_process(make_state()) as client:
        response = await client.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        assert response.json() == described
