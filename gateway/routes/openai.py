"""OpenAI's endpoints: generation goes to a worker, the list of models is the gateway's own."""

from __future__ import annotations

import time

from contracts.errors import ApiError, model_not_found
from gateway.asgi import Scope, Send, send_json
from gateway.errors import send_error
from gateway.identity.authenticator import Authenticator
from gateway.identity.identity import Identity
from gateway.identity.proxies import peer_of
from gateway.inbound import request_id
from gateway.routing import Router
from gateway.usage.record import Record
from gateway.usage.recorder import Recorder

PROXIED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MODELS = "/v1/models"


class ModelRoutes:
    """``GET /v1/models`` and ``GET /v1/models/{id}``, the id with or without slashes.

    A caller sees the models that it may use; ApiError 401 for one without a good key, where keys are needed.
    """

    def __init__(self, router: Router, auth: Authenticator, recorder: Recorder | None) -> None:
        self._router = router
        self._auth = auth
        self._recorder = recorder

    async def list(self, scope: Scope, send: Send) -> None:
        who = await self._caller(scope)
        self._router.refresh()  # so that all gateway processes say the same
        data = [_card(name, model) for name, model in self._router.models() if who.may_use(name, model)]
        await send_json(send, 200, {"object": "list", "data": data})

    async def get(self, scope: Scope, send: Send) -> None:
        who = await self._caller(scope)
        name = scope["path"].removeprefix(MODELS + "/").replace("%2F", "/")
        self._router.refresh()
        for known, model in self._router.models():
            if known == name and who.may_use(name, model):
                await send_json(send, 200, _card(name, model))
                return
        await send_error(send, model_not_found(name))

    async def _caller(self, scope: Scope) -> Identity:
        began = time.perf_counter()
        try:
            return await self._auth.identify(scope["headers"], peer_of(scope))
        except ApiError as error:  # who tries keys here is seen as well
            if self._recorder is not None:
                self._recorder.add(_refusal(scope, error, time.perf_counter() - began))
            raise


def _refusal(scope: Scope, error: ApiError, seconds: float) -> Record:
    return Record(
        at=time.time(),
        seconds=seconds,
        first_token=None,
        request_id=request_id(scope),
        path=MODELS.encode(),
        status=error.status,
        code=error.code,
        user=None,
        key_id=None,
        model="",
        target="",
        usage=None,
    )


def _card(name: str, model: str) -> dict[str, object]:
    """`root`: the model behind an alias. `created` is fixed, so that all gateways give the same answer."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "pagefleet", "root": model}
