"""Traces: what of a sampled request's time was queue, prefill and decode."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from contracts.spans import Spans, fail
from contracts.trace_context import TRACEPARENT, TRACESTATE, read_context
from worker.server.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Tracer:
    """Samples as the request's sender says, else a share of `sample_ratio`."""

    def __init__(self, spans: Spans, sample_ratio: float, model: str) -> None:
        self._spans = spans
        self._ratio = sample_ratio
        self._model = model

    def begin(self, exchange: Exchange) -> RequestTrace | None:
        """None for a request that isn't sampled."""
        context = read_context(exchange.headers(TRACEPARENT), exchange.headers(TRACESTATE))
        if not (context.sampled if context is not None else random.random() < self._ratio):
            return None
        path = exchange.scope["path"]
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "pagefleet.request_id": exchange.request_id,
            "gen_ai.request.model": self._model,
        }
        span = self._spans.start(f"POST {path}", context, server=True, attributes=attributes)
        return RequestTrace(self._spans, span)

    def close(self) -> None:
        self._spans.close()


class RequestTrace:
    """The span of one request, and those of its answers below it."""

    def __init__(self, spans: Spans, span: Span) -> None:
        self.spans = spans
        self.span = span
        self._clock = time.time_ns() - time.monotonic_ns()

    def answer(self, index: int, prompt_tokens: int) -> AnswerTrace:
        """To be called when the answer is handed to the engine."""
        return AnswerTrace(self, index, prompt_tokens)

    def unix_ns(self, moment: float) -> int:
        """`moment`: time.monotonic()."""
        return self._clock + int(moment * 1e9)

    def end(self, status: int) -> None:
        self.span.set_attribute("http.response.status_code", status)
        if status >= 500:
            fail(self.span, f"status {status}")
        self.span.end()


class AnswerTrace:
    """Spans of one answer, made when it has ended: queue, prefill, decode, one after the other."""

    def __init__(self, request: RequestTrace, index: int, prompt_tokens: int) -> None:
        self._request = request
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._arrived = time.monotonic()
        self._scheduled: float | None = None
        self._first = 0.0

    def first_token(self, queue_time: float) -> None:
        """`queue_time`: seconds from its arrival at the engine to its first step."""
        if self._scheduled is None:
            self._scheduled = self._arrived + queue_time
            self._first = max(time.monotonic(), self._scheduled)

    def end(self, tokens: int, cached_tokens: int, reason: str) -> None:
        """`reason`: stop, length, abort or error."""
        now = time.monotonic()
        last: dict[str, object] = {
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.response.finish_reasons": (reason,),
        }
        prompt: dict[str, object] = {
            "gen_ai.usage.input_tokens": self._prompt_tokens,
            "pagefleet.cached_tokens": cached_tokens,
        }
        if self._scheduled is None:  # it ended before its first token, perhaps before its first step
            self._span("queue and prefill", self._arrived, now, prompt | last)
            return
        self._span("queue", self._arrived, self._scheduled, {})
        self._span("prefill", self._scheduled, self._first, prompt)
        self._span("decode", self._first, max(now, self._first), last)

    def _span(self, name: str, started: float, ended: float, attributes: dict[str, object]) -> None:
        request = self._request
        span = request.spans.start(
            name,
            request.span,
            started=request.unix_ns(started),
            attributes={"pagefleet.choice": self._index, **attributes},
        )
        span.end(request.unix_ns(ended))
