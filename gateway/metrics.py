"""Prometheus metrics of one gateway process.

Labels are models and targets of the routes table, never what a client sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.state import Target
from gateway.routing import Router

REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)


class Metrics:
    """`done` counts one finished request; everything else is read from the router when scraped."""

    def __init__(self, router: Router) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "pagefleet_gateway_requests_total",
            "Requests by answer; 499: the client left first. No model or target: the request named none.",
            ["model", "target", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "pagefleet_gateway_request_seconds",
            "From the request's arrival to the end of its answer.",
            ["model"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._overhead = Histogram(
            "pagefleet_gateway_overhead_seconds",
            "Of the time before the first byte, what wasn't spent waiting for the client or the worker.",
            ["model"],
            buckets=OVERHEAD_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_RouteCollector(router))
        self._counters: dict[tuple[str, str, int], Counter] = {}
        self._histograms: dict[str, tuple[Histogram, Histogram]] = {}

    def done(self, model: str, target: str, status: int, seconds: float, overhead: float | None) -> None:
        """`overhead`: None when no worker answered."""
        key = (model, target, status)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._requests.labels(model, target, str(status))
        counter.inc()
        histograms = self._histograms.get(model)
        if histograms is None:
            histograms = self._histograms[model] = self._seconds.labels(model), self._overhead.labels(model)
        histograms[0].observe(seconds)
        if overhead is not None:
            histograms[1].observe(overhead)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _RouteCollector(Collector):
    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        table = self._router.table
        epoch = GaugeMetricFamily("pagefleet_route_epoch", "Version of the routes that this gateway applies.")
        epoch.add_metric([], table.epoch)
        inflight = GaugeMetricFamily(
            "pagefleet_gateway_inflight", "Requests on a target.", labels=["model", "target"]
        )
        weight = GaugeMetricFamily(
            "pagefleet_route_weight", "Weight of a target in basis points.", labels=["model", "target"]
        )
        for backend in table.backends.values():
            inflight.add_metric([backend.model, backend.target.id], backend.inflight)
        restarts = CounterMetricFamily(
            "pagefleet_worker_restarts",
            "Workers that took the place of a crashed one, since the supervisor started.",
            labels=["model", "slot"],
        )
        for model, entry in table.entries.items():
            for target in entry.routes.targets:
                weight.add_metric([model, target.id], target.weight_bp)
            for slot, count in _restarts(entry.routes.targets).items():
                restarts.add_metric([model, slot], count)
        yield from (epoch, inflight, weight, restarts)


def _restarts(targets: Iterable[Target]) -> dict[str, int]:
    """By slot, which may have several targets while one replaces another."""
    counts: dict[str, int] = {}
    for target in targets:
        counts[target.slot] = max(counts.get(target.slot, 0), target.restarts)
    return counts
