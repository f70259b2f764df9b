"""The worker's ASGI application: which path is answered by what."""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.server import admin
from worker.server.chat import chat_completions
from worker.server.completions import completions
from worker.server.embeddings import embeddings
from worker.server.endpoint import Endpoint, Handler
from worker.server.exchange import Exchange
from worker.server.native import detokenize, generate, generate_stream, tokenize
from worker.server.openapi import show_openapi
from worker.server.refusals import route_not_found
from worker.server.responses import responses
from worker.server.state import ServerState

_WORK: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
    "/generate": generate,
    "/generate_stream": generate_stream,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
_INFO: dict[str, Handler] = {
    "/v1/models": admin.models,
    "/v1/models/{model:path}": admin.model,
    "/health": admin.health,
    "/ready": admin.ready,
    "/metrics": admin.metrics,
    "/version": admin.show_version,
    "/openapi.json": show_openapi,
    "/internal/whoami": admin.whoami,
}
_INTERNAL: dict[str, Handler] = {
    "/internal/usage/{names}": admin.usage,
    "/internal/window": admin.window,
}
_ADMIN: dict[str, Handler] = {
    "/admin/drain": admin.drain,
    "/admin/undrain": admin.undrain,
    "/admin/abort": admin.abort,
    "/admin/names": admin.names,
    "/admin/reset_prefix_cache": admin.reset_prefix_cache,
    "/reset_prefix_cache": admin.reset_prefix_cache,  # where other servers have it
}


def create_app(state: ServerState) -> ASGIApp:
    """The application of one worker. It needs no lifespan: `state` is filled by whoever loads the model."""

    async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Exchange(scope, receive, send, state.model_name).fail(route_not_found())

    routes = [
        *(Route(path, Endpoint(state, {"POST": handler}, gated=True)) for path, handler in _WORK.items()),
        *(Route(path, Endpoint(state, {"GET": handler})) for path, handler in _INFO.items()),
        *(Route(path, Endpoint(state, {"GET": handler}, local=True)) for path, handler in _INTERNAL.items()),
        *(Route(path, Endpoint(state, {"POST": handler}, local=True)) for path, handler in _ADMIN.items()),
    ]
    return Router(routes, redirect_slashes=False, default=nothing_here)
