"""Prometheus metrics of one worker. Stems are vLLM's, so its dashboards carry over; no label names a user."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.ipc.messages import EngineStats

if TYPE_CHECKING:
    from worker.server.state import ServerState

_LABELS = ("model_name",)
_LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 10.0),
)
_REQUEST_BUCKETS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)


class Metrics:
    """Histograms that the server fills, and the engine's own counters read when scraped."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        model = state.model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            model,
            _LATENCY_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one answer.", model, _TOKEN_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "From arrival at the engine to the first step.",
            model,
            _LATENCY_BUCKETS,
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", model, _REQUEST_BUCKETS
        )
        finished = Counter(
            "pagefleet_request_success_total",
            "Answers that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.finished = {
            reason: finished.labels(model, reason) for reason in ("stop", "length", "abort", "error")
        }
        self.registry.register(_EngineCollector(state))
        ProcessCollector(registry=self.registry)

    def sequence(self, started: float) -> SequenceTimer:
        """A timer for one answer whose request arrived at `started` (time.monotonic)."""
        return SequenceTimer(self, started)

    def render(self) -> bytes:
        """The exposition format, text version 0.0.4."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, model: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"pagefleet_{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(model)


class SequenceTimer:
    """Times one answer: `count` tokens, the `first` and the `last` of them at those times.

    Times are time.monotonic's.
    """

    __slots__ = ("_finished", "_metrics", "count", "first", "last", "started")

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics = metrics
        self.started = started
        self.count = 0
        self.first = self.last = 0.0
        self._finished = False

    def tokens(self, count: int, queue_time: float) -> None:
        """`count` tokens have come together; `queue_time` counts on the first of an answer."""
        if not count:
            return
        now = time.monotonic()
        further = count
        if not self.count:
            self._metrics.time_to_first_token.observe(now - self.started)
            self._metrics.queue_time.observe(queue_time)
            self.first = self.last = now
            further -= 1
        for _ in range(further):
            self._metrics.inter_token_latency.observe((now - self.last) / further)
        self.count += count
        self.last = now

    def finish(self, reason: str) -> None:
        """Only the first call counts."""
        if self._finished:
            return
        self._finished = True
        self._metrics.request_latency.observe(time.monotonic() - self.started)
        self._metrics.finished[reason].inc()


class _EngineCollector(Collector):
    """The engine's statistics as of its last step."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        engine = self._state.engine
        stats = engine.stats if engine is not None else EngineStats()
        gauges = {
            "num_requests_running": ("Answers in the running batch.", stats.running),
            "num_requests_waiting": (
                "Answers that wait for their first step, or for their next.",
                stats.waiting,
            ),
            "kv_cache_usage_ratio": (
                "KV pages held by answers, of all.",
                _ratio(stats.pages_used, stats.pages_total),
            ),
            "kv_cache_waste_ratio": (
                "Token slots of held KV pages that hold no token.",
                1 - _ratio(stats.slots_filled, stats.slots_taken) if stats.slots_taken else 0.0,
            ),
            "decode_step_seconds": (
                "What a step without prompts takes, as estimated; 0: not known yet.",
                stats.decode_seconds,
            ),
            "prefill_budget_tokens": (
                "Prompt tokens that one prompt would get in a step beside answers that grow.",
                stats.prefill_budget,
            ),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hits),
            "num_preemptions": ("Answers put back to make room; they are recomputed.", stats.preemptions),
            "prompt_tokens": ("Prompt tokens taken in.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "engine_steps": ("Steps of the engine.", stats.steps),
        }
        label = (self._state.model_name,)
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"pagefleet_{name}", text, labels=_LABELS)
            gauge.add_metric(label, value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"pagefleet_{name}", text, labels=_LABELS)
            counter.add_metric(label, value)
            yield counter


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
