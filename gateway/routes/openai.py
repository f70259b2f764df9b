"""OpenAI's endpoints: generation goes to a worker, the list of models is the gateway's own."""

from __future__ import annotations

from contracts.errors import model_not_found
from gateway.asgi import Scope, Send, send_json
from gateway.errors import send_error
from gateway.routing import Router

PROXIED = ("/v1/chat/completions", "/v1/completions")
MODELS = "/v1/models"


class ModelRoutes:
    """``GET /v1/models`` and ``GET /v1/models/{id}``, the id with or without slashes."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def list(self, scope: Scope, send: Send) -> None:
        data = [_card(name, model) for name, model in self._router.models()]
        await send_json(send, 200, {"object": "list", "data": data})

    async def get(self, scope: Scope, send: Send) -> None:
        name = scope["path"].removeprefix(MODELS + "/")
        for known, model in self._router.models():
            if known == name:
                await send_json(send, 200, _card(name, model))
                return
        await send_error(send, model_not_found(name))


def _card(name: str, model: str) -> dict[str, object]:
    """`root`: the model behind an alias. `created` is fixed, so that all gateways give the same answer."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "pagefleet", "root": model}
