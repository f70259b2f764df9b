"""Prometheus metrics of the gateway: of this process, or, with its peers' boards, of all of them together.

Labels are models and targets of the routes table, never what a client sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.board import (
    INFLIGHT,
    QUEUE_WAITING,
    ROUTE_EPOCH,
    TARGET_ERRORS,
    TARGET_REQUESTS,
    Board,
    Peer,
    Reading,
)
from gateway.families import Combine, Counter, Families, Gauge, Histogram, Labels
from gateway.fleet.state import Target
from gateway.routing import Router

REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)

MAX_KNOWN = 4096
# Of requests, their seconds, their overheads.
_Numbers = tuple["memoryview[float]", "memoryview[float]", "memoryview[float]"]


class Metrics:
    """`done` counts one finished request, `ended` what became of it on a target that took it. Others add what
    they count with `counter`, `histogram`, `gauge`.

    `board`: this process's; `peers`: those of the other processes, also of ones that are down.
    """

    def __init__(self, router: Router, board: Board | None = None, peers: Iterable[Peer] = ()) -> None:
        self.board = board or Board()
        self.peers = tuple(peers)
        self.registry = CollectorRegistry()
        self._families = Families(self._read)
        self._gauges: list[Gauge] = []
        self._known: dict[tuple[str, str, int], _Numbers] = {}
        self._router = router
        self._requests = self.counter(
            "pagefleet_gateway_requests_total",
            "Requests by answer; 499: the client left first. No model or target: the request named none.",
            ["model", "target", "status"],
        )
        self._ended = self.counter(
            TARGET_REQUESTS,
            "Requests that a target took and that ended there, without those that the client left.",
            ["model", "target"],
        )
        self._failed = self.counter(
            TARGET_ERRORS,
            "Of these, answers of 5xx, lost connections and streams that broke off.",
            ["model", "target"],
        )
        self._seconds = self.histogram(
            "pagefleet_gateway_request_seconds",
            "From the request's arrival to the end of its answer.",
            ["model"],
            REQUEST_BUCKETS,
        )
        self._overhead = self.histogram(
            "pagefleet_gateway_overhead_seconds",
            "Of the time before the first byte, what wasn't spent waiting for the client or the worker.",
            ["model"],
            OVERHEAD_BUCKETS,
        )
        self._queue_seconds = self.histogram(
            "pagefleet_gateway_queue_seconds",
            "How long requests waited for a worker with room, those that had to.",
            ["model"],
            REQUEST_BUCKETS,
        )
        self._queue_refused = self.counter(
            "pagefleet_gateway_queue_refused_total",
            "Requests of an overloaded model that got no worker, by reason.",
            ["model", "reason"],
        )
        self._exhausted = self.counter(
            "pagefleet_gateway_exhausted_total",
            "Requests refused as the gateway had no descriptor, port or memory for them.",
        )
        self._exhausted.inc(by=0)
        router.on_waited = lambda model, seconds: self._queue_seconds.observe((model,), seconds)
        router.on_refused = lambda model, reason: self._queue_refused.inc((model, reason))
        self._add_gauges()
        self.registry.register(self._families)
        self.registry.register(_RouteCollector(router))

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """`name` ends in `_total`."""
        counter = Counter(self.board, name, text, labels)
        self._families.add(counter)
        return counter

    def histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(self.board, name, text, labels, buckets)
        self._families.add(histogram)
        return histogram

    def gauge(
        self,
        name: str,
        text: str,
        read: Callable[[], Iterable[tuple[Labels, float]]],
        labels: Sequence[str] = (),
        combine: Combine = sum,
    ) -> None:
        """`read` gives (labels, value) pairs; `combine` makes one of the living processes' values."""
        gauge = Gauge(self.board, name, text, labels, combine, read)
        self._gauges.append(gauge)
        self._families.add(gauge)

    def done(self, model: str, target: str, status: int, seconds: float, overhead: float | None) -> None:
        """`overhead`: None when no worker answered."""
        known = self._known.get((model, target, status)) or self._get_known(model, target, status)
        requests, all_seconds, overheads = known
        requests[0] += 1
        all_seconds[bisect_left(REQUEST_BUCKETS, seconds)] += 1
        all_seconds[-1] += seconds
        if overhead is not None:
            overheads[bisect_left(OVERHEAD_BUCKETS, overhead)] += 1
            overheads[-1] += overhead

    def _get_known(self, model: str, target: str, status: int) -> _Numbers:
        """Looked up once: this is counted for every request."""
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        numbers = self._known[model, target, status] = (
            self._requests.numbers((model, target, str(status))),
            self._seconds.numbers((model,)),
            self._overhead.numbers((model,)),
        )
        return numbers

    def ended(self, labels: Labels, good: bool) -> None:
        """`labels`: model and target. A request that went to several targets counts on each that took it."""
        self._ended.inc(labels)
        if not good:
            self._failed.inc(labels)

    def exhausted(self) -> None:
        """A request got no worker by this process's own fault."""
        self._exhausted.inc()

    def show(self) -> None:
        """Shows the other processes what the gauges say."""
        for gauge in self._gauges:
            gauge.publish()

    def publish(self) -> None:
        """The same, and that this process lives."""
        self.show()
        self.board.beat()

    def render(self) -> bytes:
        """The exposition format, text version 0.0.4."""
        return generate_latest(self.registry)

    def _read(self) -> Iterator[Reading]:
        self.publish()
        yield self.board.read()
        for peer in self.peers:
            reading = peer.read()
            if reading is not None:
                yield reading

    def _add_gauges(self) -> None:
        router = self._router

        def epoch() -> Iterator[tuple[Labels, float]]:
            yield (), router.table.epoch

        def inflight() -> Iterator[tuple[Labels, float]]:
            for backend in router.table.backends.values():
                yield backend.labels, backend.inflight

        def up() -> Iterator[tuple[Labels, float]]:
            for backend in router.table.ready:
                yield backend.labels, backend.health.serving

        def waiting() -> Iterator[tuple[Labels, float]]:
            for model, queue in router.queues.items():
                yield (model,), queue.waiting

        self.gauge("pagefleet_gateway_processes", "Gateway processes that live.", lambda: [((), 1.0)])
        # Before the epoch: gateway/fleet/observer.py relies on that order.
        self.gauge(INFLIGHT, "Requests on a target.", inflight, ["model", "target"])
        self.gauge(ROUTE_EPOCH, "Version of the routes that all processes apply.", epoch, combine=min)
        self.gauge(
            "pagefleet_route_epoch_max", "Newest version that one of them applies.", epoch, combine=max
        )
        self.gauge(
            "pagefleet_gateway_target_up",
            "1: all processes send requests to this ready target; 0: one finds it failing or stuck.",
            up,
            ["model", "target"],
            combine=min,
        )
        self.gauge(
            QUEUE_WAITING,
            "Requests that wait for a worker with room.",
            waiting,
            ["model"],
        )


class _RouteCollector(Collector):
    """What the routes document says, which is the same for all processes."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        weight = GaugeMetricFamily(
            "pagefleet_route_weight", "Weight of a target in basis points.", labels=["model", "target"]
        )
        restarts = CounterMetricFamily(
            "pagefleet_worker_restarts",
            "Workers that took the place of a crashed one, since the supervisor started.",
            labels=["model", "slot"],
        )
        for model, entry in self._router.table.entries.items():
            for target in entry.routes.targets:
                weight.add_metric([model, target.id], target.weight_bp)
            for slot, count in _restarts(entry.routes.targets).items():
                restarts.add_metric([model, slot], count)
        yield from (weight, restarts)


def _restarts(targets: Iterable[Target]) -> dict[str, int]:
    """By slot, which may have several targets while one replaces another."""
    counts: dict[str, int] = {}
    for target in targets:
        counts[target.slot] = max(counts.get(target.slot, 0), target.restarts)
    return counts
