"""The gateway's ASGI application: paths to handlers, and the lifespan of routes and connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from contracts.errors import ApiError
from contracts.headers import REQUEST_ID
from gateway import errors
from gateway.accounting import UsageCollector
from gateway.admission import Admission, Limits
from gateway.asgi import Headers, Message, Receive, Scope, Send, send_bytes
from gateway.board import CONFIG, Board, Peer
from gateway.call import Means, ProxySettings
from gateway.config import FleetFile
from gateway.health import HealthSettings
from gateway.identity.authenticator import Authenticator
from gateway.inbound import request_id
from gateway.metrics import Metrics
from gateway.prober import Prober
from gateway.proxy import Proxy
from gateway.reload import Reload
from gateway.routes import native, openai
from gateway.routes.admin import AdminRoutes
from gateway.routes.openapi import Description
from gateway.routing import Router, RouterSettings
from gateway.targets import Table
from gateway.tracing import Tracer
from gateway.upstream import Upstream
from gateway.usage.recorder import RecordSettings, open_recorder
from gateway.worker_metrics import WorkerMetrics

Handler = Callable[[Scope, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class QueueSettings(Protocol):
    """How many requests may wait for a worker."""

    @property
    def size(self) -> int: ...


class Settings(ProxySettings, RecordSettings, Protocol):
    """The part of the gateway's settings that is read here."""

    @property
    def processes(self) -> int: ...
    @property
    def health(self) -> HealthSettings: ...
    @property
    def queue(self) -> QueueSettings: ...


class Gateway:
    """ASGI application.

    `configured`: model name → aliases of the fleet file; `routes_path`: the supervisor's routes file;
    `auth`: who may call, and `limits`: how much, both closed at the end; `state_dir`: where usage is kept;
    `board`, `peers`: where this process shows its numbers, and where the others on the same port do;
    `tracer`: of sampled requests, closed at the end.
    Generation and models need a key where keys are needed; what probes and scrapers ask for is open to all
    who reach the port. `close` when its server has ended.
    """

    def __init__(
        self,
        settings: Settings,
        configured: Mapping[str, Iterable[str]],
        routes_path: Path,
        auth: Authenticator,
        limits: Limits,
        state_dir: Path,
        board: Board | None = None,
        peers: Iterable[Peer] = (),
        tracer: Tracer | None = None,
    ) -> None:
        self._auth = auth
        self._tracer = tracer
        self._background: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.upstream = Upstream()
        self.prober = Prober(self.upstream, settings.health, settings.processes)
        self._probing = False
        rules = RouterSettings(
            settings.health.max_fails, settings.health.fail_timeout, settings.queue.size, True
        )
        self.router = Router(routes_path, configured, self._routes_changed, rules)
        self.metrics = Metrics(self.router, board, peers)
        self.admission = Admission(limits, self.metrics)
        self.usage = UsageCollector(self.upstream)
        self.recorder = open_recorder(settings, state_dir, self.metrics)
        self.means = Means(
            self.router, self.upstream, self.metrics, settings, self.admission, self.usage, self.recorder
        )
        self.proxy = Proxy(self.means, auth, tracer)
        admin = AdminRoutes(self.router, self.metrics, WorkerMetrics(self.router, self.upstream))
        self._models = openai.ModelRoutes(self.router, auth, self.recorder)
        self._proxied = {path: path.encode() for path in (*openai.PROXIED, *native.PROXIED)}
        self._own: dict[str, Handler] = {
            openai.MODELS: self._models.list,
            "/health": admin.health,
            "/ready": admin.ready,
            "/metrics": admin.metrics,
            "/metrics/workers": admin.worker_metrics,
            "/version": admin.version,
            "/openapi.json": Description(self.router, self.upstream, self._proxied, auth.wants_keys).show,
        }

    def follow(self, fleet_file: Path) -> None:
        """Names, limits and time limits are as the file says, also when it is replaced; the board shows which
        one that is."""
        applied = self.metrics.board.numbers((CONFIG,))
        applied[0] = 0.0

        def use(fleet: FleetFile, digest: int) -> None:
            self.router.configure({entry.name: entry.aliases for entry in fleet.models})
            limits = {entry.name: entry.limits for entry in fleet.models}
            self.admission.configure(fleet.gateway.limits.default, limits)
            self.means.settings = fleet.gateway
            applied[0] = digest

        self._background.append(Reload(fleet_file, use).run)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            return self._http(scope, receive, send)
        if scope["type"] == "lifespan":
            return self._lifespan(receive, send)
        raise RuntimeError(f"unexpected ASGI scope {scope['type']!r}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            path = self._proxied.get(scope["path"])
            if scope["exchange"].upgrade:
                raise errors.upgrade_refused()
            if path is not None and scope["method"] == "POST":
                await self.proxy.forward(path, scope, receive, send)
            else:
                await self._serve_own(scope, send)
        except ApiError as error:
            await errors.send_error(send, error, _request_id(scope))
        except Exception:
            log.exception("error while serving %s", scope["method"])
            # Raises when an answer had begun; the server then closes the connection on it.
            await errors.send_error(send, errors.gateway_bug(), _request_id(scope))

    async def _serve_own(self, scope: Scope, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        handler = self._own.get(path)
        if handler is None and path.startswith(openai.MODELS + "/"):
            handler = self._models.get
        if handler is not None:
            allowed = "GET, HEAD, OPTIONS"
        elif path in self._proxied:
            allowed = "POST, OPTIONS"
        else:
            raise errors.route_not_found(path)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += _request_id(scope)
            await send(message)

        if method == "OPTIONS":
            await send_bytes(send_with_id, 200, b"", b"text/plain", [(b"allow", allowed.encode())])
        elif handler is not None and method in ("GET", "HEAD"):
            await handler(scope, send_with_id)
        else:
            raise errors.method_not_allowed(method, path, allowed)

    def _routes_changed(self, table: Table) -> None:
        self.upstream.retain(table.addresses)
        if self._probing:
            self.prober.watch(table.ready)
            self.metrics.show()  # at once: a rollout waits for it

    def close(self) -> None:
        """Once nothing runs any more: writes down what is left of what ran."""
        if self.recorder is not None:
            self.recorder.close()
        if self._tracer is not None:
            self._tracer.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        tasks = [
            asyncio.create_task(self.router.poll(), name="routes"),
            asyncio.create_task(self._auth.run(), name="auth"),
            *(asyncio.create_task(run()) for run in self._background),
        ]
        self._probing = True
        self.prober.watch(self.router.table.ready)
        if self.recorder is not None:
            self.recorder.start()
        await self.admission.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._probing = False
        await self.prober.aclose()
        await self.usage.aclose()
        await self.admission.aclose()
        self.upstream.close()
        self._auth.close()
        await send({"type": "lifespan.shutdown.complete"})


def _request_id(scope: Scope) -> Headers:
    return [(REQUEST_ID.encode(), request_id(scope))]
