"""Health, readiness, metrics and version: answered here, without a worker."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST

from contracts.errors import unavailable
from gateway.asgi import Scope, Send, send_bytes, send_json
from gateway.metrics import Metrics
from gateway.routing import Router
from gateway.worker_metrics import WorkerMetrics


class AdminRoutes:
    """What probes and scrapers ask for."""

    def __init__(self, router: Router, metrics: Metrics, workers: WorkerMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self._workers = workers
        self._version = version("pagefleet")

    async def health(self, scope: Scope, send: Send) -> None:
        """The answer itself shows that the event loop makes progress."""
        await send_json(send, 200, {"status": "ok"})

    async def ready(self, scope: Scope, send: Send) -> None:
        """200 when every model has a ready worker, else 503 with the list of those that have none."""
        self._router.refresh()  # so that all gateway processes say the same
        missing = self._router.not_ready()
        if not missing:
            await send_json(send, 200, {"status": "ready", "not_ready": []})
            return
        error = unavailable(f"No ready worker for: {', '.join(missing)}.", "not_ready")
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await send_json(send, error.status, {**error.body(), "not_ready": missing}, headers)

    async def metrics(self, scope: Scope, send: Send) -> None:
        await send_bytes(send, 200, self._metrics.render(), CONTENT_TYPE_LATEST.encode())

    async def worker_metrics(self, scope: Scope, send: Send) -> None:
        await send_bytes(send, 200, await self._workers.render(), CONTENT_TYPE_LATEST.encode())

    async def version(self, scope: Scope, send: Send) -> None:
        await send_json(send, 200, {"version": self._version})
