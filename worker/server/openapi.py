"""GET /openapi.json: the API's description, made of the very types that decode requests and their bounds."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import msgspec

from contracts.times import Times
from contracts.usage import UsageReport
from worker.server import answer_shapes as shapes
from worker.server import schemas
from worker.server.exchange import Exchange
from worker.server.not_offered import refused_fields
from worker.server.openapi_bounds import bound
from worker.server.responses_input import ResponsesRequest
from worker.server.state import ServerState

Schema = dict[str, Any]

REFS: Final = "#/components/schemas/{name}"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
TEXT: Final = "text/plain"


class Operation(NamedTuple):
    """One method of one path. `errors`: statuses whose body is an error; `streams`: the content type when the
    answer comes in pieces; `local`: for the machine's own operators."""

    method: str
    path: str
    summary: str
    body: type | None
    answer: Any
    errors: tuple[int, ...] = ()
    streams: str | None = None
    local: bool = False


_NO_REQUEST: Final = (400, 408, 431)  # to what is no HTTP, or doesn't come, or is too much
_WORK_ERRORS: Final = (404, 405, 413, 500, 503)
_ADMIN_ERRORS: Final = (404, 405, 413, 500, 503)

OPERATIONS: Final = (
    Operation(
        "post", "/v1/chat/completions", "Answer a chat.",
        schemas.ChatRequest, shapes.ChatCompletion, _WORK_ERRORS, EVENTS,
    ),
    Operation(
        "post", "/v1/completions", "Continue one or more prompts.",
        schemas.CompletionRequest, shapes.Completion, _WORK_ERRORS, EVENTS,
    ),
    Operation(
        "post", "/v1/responses", "Answer a list of items with items.",
        ResponsesRequest, shapes.Response, _WORK_ERRORS, EVENTS,
    ),
    Operation(
        "post", "/v1/embeddings", "A vector for each input.",
        schemas.EmbeddingRequest, shapes.EmbeddingList, _WORK_ERRORS,
    ),
    Operation(
        "post", "/generate", "Continue one prompt, with token ids.",
        schemas.GenerateRequest, shapes.Generated, _WORK_ERRORS, LINES,
    ),
    Operation(
        "post", "/generate_stream", "The same, one JSON object a line while tokens come.",
        schemas.GenerateRequest, None, _WORK_ERRORS, LINES,
    ),
    Operation(
        "post", "/tokenize", "Token ids of a text or a chat.",
        schemas.TokenizeRequest, shapes.Tokenized, _WORK_ERRORS,
    ),
    Operation(
        "post", "/detokenize", "The text of token ids.",
        schemas.DetokenizeRequest, shapes.Detokenized, _WORK_ERRORS,
    ),
    Operation("get", "/v1/models", "The models by all their names.", None, shapes.ModelList, (405,)),
    Operation("get", "/v1/models/{model}", "One model.", None, shapes.ModelCard, (404, 405)),
    Operation("get", "/health", "Whether the process makes progress.", None, shapes.Health, (405, 500, 503)),
    Operation("get", "/ready", "Whether the model answers; 503 until then.", None, shapes.Readiness, (405,)),
    Operation("get", "/metrics", "Metrics, for Prometheus.", None, TEXT, (405,)),
    Operation("get", "/version", "The version of pagefleet.", None, shapes.Version, (405,)),
    Operation("get", "/openapi.json", "This description.", None, dict[str, Any], (405,)),
    Operation("get", "/internal/whoami", "Which worker this is.", None, shapes.WhoAmI, (405,)),
    Operation(
        "get", "/internal/usage/{names}", "What requests used, by the names that a gateway gave them.",
        None, list[UsageReport], (404, 405), local=True,
    ),
    Operation("get", "/internal/window", "How long requests took.", None, Times, (404, 405), local=True),
    Operation(
        "post", "/admin/drain", "Take no new requests.", None, shapes.Draining, _ADMIN_ERRORS, local=True
    ),
    Operation(
        "post", "/admin/undrain", "Take requests again.", None, shapes.Draining, _ADMIN_ERRORS, local=True
    ),
    Operation(
        "post", "/admin/abort", "End requests, all or some.",
        schemas.AbortRequest, shapes.Aborted, _ADMIN_ERRORS, local=True,
    ),
    Operation(
        "post", "/admin/names", "Names that requests may use from now on.",
        schemas.NamesRequest, schemas.NamesRequest, _ADMIN_ERRORS, local=True,
    ),
    *(
        Operation("post", path, "Forget cached prompts.", None, shapes.Reset, _ADMIN_ERRORS, local=True)
        for path in ("/admin/reset_prefix_cache", "/reset_prefix_cache")
    ),
)  # fmt: skip

_EVENT: Final[Schema] = {
    "type": "object",
    "properties": {
        "data": {"type": "string", "contentMediaType": JSON, "description": "A chunk, or [DONE]."}
    },
    "required": ["data"],
}


async def show_openapi(state: ServerState, exchange: Exchange) -> None:
    await exchange.respond(document())


@functools.cache
def document() -> bytes:
    """The whole description, OpenAPI 3.1 as JSON."""
    try:
        number = version("pagefleet")
    except PackageNotFoundError:  # run from a source tree
        number = "unknown"
    schema_of, components = _schemas(OPERATIONS)
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "pagefleet", "version": number},
            "paths": paths,
            "components": {
                "schemas": components,
                "responses": {
                    "Error": {
                        "description": "What went wrong, and which field is at fault.",
                        "content": {JSON: {"schema": {"$ref": REFS.format(name="Error")}}},
                    }
                },
            },
        }
    )


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Schemas of bodies and answers, by type; and what they refer to, by name."""
    found = dict.fromkeys(
        kind for operation in operations for kind in (operation.body, operation.answer) if _is_type(kind)
    )
    shown = [_without_raw(kind) for kind in found]
    written, components = msgspec.json.schema_components([*shown, shapes.Error], ref_template=REFS)
    bodies = {operation.body.__name__ for operation in operations if operation.body is not None}
    bodies.add(schemas.StructuredFields.__name__)
    for name, schema in components.items():
        schema.pop("title", None)
        if name in bodies:
            bound(name, schema["properties"])
    return dict(zip(found, written)), components


def _is_type(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def _without_raw(kind: Any) -> Any:
    """The same type with `Any` in place of `msgspec.Raw`, which a schema can't show."""
    if kind is msgspec.Raw:
        return Any
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _shown_struct(kind)
    arguments = typing.get_args(kind)
    if not arguments or typing.get_origin(kind) is typing.Literal:
        return kind
    inner = tuple(map(_without_raw, arguments))
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return functools.reduce(lambda left, right: left | right, inner)
    return origin[inner]


@functools.cache
def _shown_struct(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        shown = _without_raw(field.type)
        if field.name in refused_fields(kind):
            continue
        if field.required:
            fields.append((field.encode_name, shown))
        elif field.default is msgspec.NODEFAULT:
            fields.append((field.encode_name, shown, msgspec.field(default_factory=field.default_factory)))
        else:
            default = None if isinstance(field.default, msgspec.Raw) else field.default
            fields.append((field.encode_name, shown, default))
    config = kind.__struct_config__
    made = msgspec.defstruct(
        kind.__name__,
        fields,
        kw_only=True,
        tag=config.tag,
        tag_field=config.tag_field,
        module=kind.__module__,
    )
    made.__doc__ = kind.__doc__
    return made


def _described(operation: Operation, schema_of: Mapping[Any, Schema]) -> Schema:
    answered: Schema = {}
    if operation.answer == TEXT:
        answered[TEXT] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        answered[JSON] = {"schema": schema_of[operation.answer]}
    if operation.streams is not None:
        answered[operation.streams] = {
            "schema": _EVENT if operation.streams == EVENTS else {"type": "string"}
        }
    good = {"description": "The answer.", "content": answered}
    responses: Schema = {"200": good}
    if operation.path == "/ready":
        responses["503"] = good
    for status in sorted({*operation.errors, *_NO_REQUEST}):
        responses[str(status)] = {"$ref": "#/components/responses/Error"}
    described: Schema = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").translate({ord(c): None for c in "{}"}),
        "tags": ["administration" if operation.local else "api"],
        "responses": responses,
    }
    if operation.local:
        described["description"] = "From the same machine only, without an Origin header."
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body is not schemas.AbortRequest,
            "content": {JSON: {"schema": schema_of[operation.body]}},
        }
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return described
