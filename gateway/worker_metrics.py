"""The metrics of all workers as one page, since they listen on sockets that no scraper reaches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.ask_worker import ask_worker
from gateway.routing import Router
from gateway.upstream import Upstream

log = logging.getLogger(__name__)


class WorkerMetrics:
    """Asks all workers that serve, at the same time; one that doesn't answer in time is left out."""

    def __init__(self, router: Router, upstream: Upstream) -> None:
        self._router = router
        self._upstream = upstream

    async def render(self) -> bytes:
        """The exposition format, text version 0.0.4; every sample has the label `target`."""
        backends = self._router.table.backends.values()
        targets = [backend.target for backend in backends if backend.target.state in ("ready", "draining")]
        pages = await asyncio.gather(
            *(ask_worker(self._upstream, target.address, b"/metrics") for target in targets)
        )
        # Parsing takes milliseconds a worker, which requests on their way shouldn't have to wait for.
        named = [(target.id, page) for target, page in zip(targets, pages) if page is not None]
        return await asyncio.to_thread(merge, named)


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
