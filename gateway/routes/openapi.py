"""GET /openapi.json: what a worker says of the requests that it takes, and what the gateway adds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec

from contracts.errors import unavailable
from gateway.asgi import JSON, Scope, Send, send_bytes
from gateway.ask_worker import ask_worker
from gateway.fleet.state import Target
from gateway.routing import Router
from gateway.upstream import Upstream

Document = dict[str, Any]

_SCHEMA: Final = "#/components/schemas/"
_ERROR: Final = {"$ref": "#/components/responses/Error"}
# Paths of a worker that the gateway answers itself, in the same words.
_LIKE_A_WORKER: Final = ("/v1/models", "/v1/models/{model}", "/metrics", "/version", "/openapi.json")
_NO_REQUEST: Final = (400, 405, 408, 431)
_BEFORE_A_WORKER: Final = (400, 404, 405, 408, 411, 413, 415, 429, 431, 500, 502, 503, 504)
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class Description:
    """Made of the newest word of a ready worker: gateway and workers may be of different versions.

    `proxied`: paths that go to workers; `wants_keys`: they need a key or a token.
    """

    def __init__(
        self, router: Router, upstream: Upstream, proxied: Collection[str], wants_keys: bool
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._proxied = proxied
        self._wants_keys = wants_keys
        self._made: tuple[str, bytes] = ("", b"")  # whose word, and what became of it

    async def show(self, scope: Scope, send: Send) -> None:
        """ApiError 503 while no worker is ready."""
        self._router.refresh()
        for backend in self._router.table.ready:
            if await self._ask(backend.target):
                await send_bytes(send, 200, self._made[1], JSON)
                return
        raise unavailable(
            "No worker is ready that could describe the API; GET /ready says more.", "not_ready"
        )

    async def _ask(self, target: Target) -> bool:
        """Whether there is a description by this worker."""
        if self._made[0] == target.id:
            return True
        body = await ask_worker(self._upstream, target.address, b"/openapi.json")
        if body is None:
            return False
        try:
            document = msgspec.json.decode(body, type=Document)
            self._made = (target.id, msgspec.json.encode(self._adapted(document)))
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):  # a worker of another kind
            return False
        return True

    def _adapted(self, document: Document) -> Document:
        theirs = document["paths"]
        paths = {path: theirs[path] for path in _LIKE_A_WORKER}
        for path in self._proxied:
            if path in theirs:
                paths[path] = {"post": self._proxied_operation(theirs[path]["post"])}
        if self._wants_keys:
            for path in ("/v1/models", "/v1/models/{model}"):
                paths[path] = {"get": self._with_keys(theirs[path]["get"])}
            document["components"]["securitySchemes"] = _KEYS
        paths["/openapi.json"]["get"]["responses"]["503"] = _ERROR  # while no worker is ready
        shown = {**document, "paths": {**paths, **_own_paths()}}
        components = document["components"]
        used = _used(shown["paths"], components["schemas"])
        return {**shown, "components": {**components, "schemas": used}}

    def _proxied_operation(self, operation: Document) -> Document:
        more = {str(status): _ERROR for status in _BEFORE_A_WORKER}
        return self._with_keys({**operation, "responses": {**more, **operation["responses"]}})

    def _with_keys(self, operation: Document) -> Document:
        if not self._wants_keys:
            return operation
        needed: list[Document] = [{name: []} for name in _KEYS]
        responses = {**operation["responses"], "401": _ERROR, "503": _ERROR}
        return {**operation, "security": needed, "responses": responses}


def _used(paths: Document, schemas: Document) -> Document:
    """The schemas that `paths` refer to: not those of a worker's own paths."""
    found: set[str] = set()
    unread: list[Any] = [paths, {"$ref": f"{_SCHEMA}Error"}]
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).removeprefix(_SCHEMA)
            if name in schemas and name not in found:
                found.add(name)
                unread.append(schemas[name])
        if isinstance(value, (dict, list)):
            unread.extend(value.values() if isinstance(value, dict) else value)
    return {name: schema for name, schema in schemas.items() if name in found}


def _own_paths() -> Document:
    """Paths that only the gateway has, or that it answers in its own way."""
    names = {"type": "array", "items": {"type": "string"}}
    ready = _object(status={"const": "ready"}, not_ready=names)
    not_ready = _object(error={"$ref": "#/components/schemas/ErrorDetail"}, not_ready=names)
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/health": _get("Whether the process is alive.", {"200": _json(_object(status={"const": "ok"}))}),
        "/ready": _get(
            "Whether every model has a ready worker.", {"200": _json(ready), "503": _json(not_ready)}
        ),
        "/metrics/workers": _get(
            "The metrics of all workers.", {"200": {"description": "The page.", "content": text}}
        ),
    }


def _get(summary: str, responses: Document) -> Document:
    errors = {str(status): _ERROR for status in _NO_REQUEST}
    return {"get": {"summary": summary, "tags": ["api"], "responses": {**responses, **errors}}}


def _json(schema: Document) -> Document:
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _object(**properties: Document) -> Document:
    return {"type": "object", "properties": properties, "required": list(properties)}
