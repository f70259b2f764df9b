"""The metrics of all workers as one page, since they listen on sockets that no scraper reaches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.connection import UpstreamError
from gateway.fleet.state import Target
from gateway.routing import Router
from gateway.upstream import Upstream

SCRAPE_SECONDS = 2.0
MAX_PAGE = 4 * 1024**2
_REQUEST = b"GET /metrics HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Timeouts:
    connect: float = SCRAPE_SECONDS
    first_byte: float = SCRAPE_SECONDS
    idle: float = SCRAPE_SECONDS
    total: float = SCRAPE_SECONDS


class WorkerMetrics:
    """Asks all workers that serve, at the same time; one that doesn't answer in time is left out."""

    def __init__(self, router: Router, upstream: Upstream) -> None:
        self._router = router
        self._upstream = upstream

    async def render(self) -> bytes:
        """The exposition format, text version 0.0.4; every sample has the label `target`."""
        backends = self._router.table.backends.values()
        targets = [backend.target for backend in backends if backend.target.state in ("ready", "draining")]
        pages = await asyncio.gather(*(self._scrape(target) for target in targets))
        # Parsing takes milliseconds a worker, which requests on their way shouldn't have to wait for.
        named = [(target.id, page) for target, page in zip(targets, pages) if page is not None]
        return await asyncio.to_thread(merge, named)

    async def _scrape(self, target: Target) -> bytes | None:
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                return await self._fetch(target.address)
        except (UpstreamError, TimeoutError) as error:
            log.debug("no metrics from %s: %s", target.id, error)
            return None

    async def _fetch(self, address: str) -> bytes | None:
        connection = await self._upstream.connect(address, SCRAPE_SECONDS)
        try:
            ends_at = asyncio.get_running_loop().time() + SCRAPE_SECONDS
            connection.start(_REQUEST, b"", _Timeouts(), SCRAPE_SECONDS, ends_at)
            await connection.head()
            page = bytearray()
            while piece := await connection.read():
                page += piece
                if len(page) > MAX_PAGE:
                    return None
            return bytes(page) if connection.status == 200 else None
        finally:
            connection.close()


def merge(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """One page out of (target, page): each family once, its samples told apart by the label `target`."""
    families: dict[str, Metric] = {}
    for target, page in pages:
        try:
            found = list(text_string_to_metric_families(page.decode()))
        except ValueError as error:
            log.warning("the metrics of %s can't be read: %s", target, error)
            continue
        for family in found:
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [
                sample._replace(labels={**sample.labels, "target": target}) for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Collected(families.values()))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
