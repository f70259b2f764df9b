"""Traces: a span for each sampled request, continued by the worker."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

from contracts.spans import Spans, context_of, fail
from contracts.trace_context import new_context
from gateway.inbound import Head

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class TracingSettings(Protocol):
    """The part of the fleet file that says what is traced."""

    @property
    def endpoint(self) -> str | None: ...
    @property
    def sample_ratio(self) -> float: ...


def open_tracer(settings: TracingSettings, place: str) -> Tracer | None:
    """To be closed; None where tracing is off. `place`: which process this is, slot.generation."""
    if settings.endpoint is None:
        return None
    return Tracer(Spans(settings.endpoint, "pagefleet-gateway", place), settings.sample_ratio)


class Tracer:
    """Decides which requests are sampled: as their callers say, else a share of `sample_ratio`."""

    def __init__(self, spans: Spans, sample_ratio: float) -> None:
        self._spans = spans
        self._ratio = sample_ratio

    def begin(self, head: Head, path: str) -> Trace | None:
        """Notes in `head` what the worker is told. None for a request that isn't sampled."""
        context = head.trace
        sampled = context.sampled if context is not None else random.random() < self._ratio
        if not sampled:
            head.trace = context or new_context(sampled=False)
            return None
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "pagefleet.request_id": head.request_id.decode(),
        }
        span = self._spans.start(f"POST {path}", context, server=True, attributes=attributes)
        head.trace = context_of(span, context.state if context is not None else b"")
        return Trace(span)

    def close(self) -> None:
        self._spans.close()


class Trace:
    """The span of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, model: str, target: str, status: int, overhead: float | None) -> None:
        """`overhead`: seconds of the gateway's own before the first byte."""
        attributes: dict[str, str | int | float] = {"http.response.status_code": status}
        if model:
            attributes["gen_ai.request.model"] = model
        if target:
            attributes["pagefleet.target"] = target
        if overhead is not None:
            attributes["pagefleet.overhead_seconds"] = overhead
        self._span.set_attributes(attributes)
        if status >= 500:
            fail(self._span, f"status {status}")
        self._span.end()
