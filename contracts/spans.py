"""Spans of OpenTelemetry, sent over OTLP/HTTP by a thread of their own. Imports the SDK when one is opened.

A request is never held up: spans wait in a bounded queue, what finds it full is dropped, and a collector that
fails or hangs costs a line in the log.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from contracts.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACES_PATH = "/v1/traces"
CLOSE_SECONDS = 2.0
SAY_AGAIN_SECONDS = 60.0

_SDK = "opentelemetry.exporter.otlp.proto.http"
_EXPORTER_LOG = f"{_SDK}.trace_exporter"


def checked_endpoint(value: str | None) -> str | None:
    """A collector's address, with the path that OTLP has for traces where it has none; ValueError says what
    is wrong with it."""
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise ValueError(
            f"a collector's address is needed, as http://127.0.0.1:4318{TRACES_PATH}; headers with a secret "
            "belong into the environment, OTEL_EXPORTER_OTLP_HEADERS"
        )
    if not _installed():
        raise ValueError("OpenTelemetry isn't installed: pip install 'pagefleet[tracing]'")
    return value.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else value


Endpoint = Annotated[str | None, AfterValidator(checked_endpoint)]


def _installed() -> bool:
    try:
        return importlib.util.find_spec(_SDK) is not None
    except ModuleNotFoundError:
        return False


class Spans:
    """One process's spans: `service` and `place` (slot.generation) tell whose they are.

    Everything started here is exported: whether to sample was decided before.
    """

    def __init__(self, endpoint: str, service: str, place: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        logging.getLogger(_EXPORTER_LOG).addFilter(_OnceInAWhile())
        number = version("pagefleet")
        named = {"service.name": service, "service.version": number, "service.instance.id": place}
        # Not at exit: a collector that hangs would hold the process for half a minute.
        self._provider = TracerProvider(ALWAYS_ON, Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("pagefleet", number)

    def start(
        self,
        name: str,
        parent: TraceContext | Span | None,
        *,
        server: bool = False,
        started: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """A span to be ended. `parent`: None begins a trace; `server`: it serves a request from elsewhere;
        `started`: Unix time in ns, default now."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        context = _context_of(parent)
        return self._tracer.start_span(name, context, kind, attributes, start_time=started)

    def close(self) -> None:
        """Sends what is there, for at most CLOSE_SECONDS."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _context_of(parent: TraceContext | Span | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    if isinstance(parent, TraceContext):
        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = NonRecordingSpan(SpanContext(parent.trace_id, parent.parent_id, True, flags))
    return set_span_in_context(parent, Context())


def context_of(span: Span, state: bytes = b"") -> TraceContext:
    """What a request that this span sends on carries."""
    own = span.get_span_context()
    return TraceContext(own.trace_id, own.span_id, True, state)


def fail(span: Span, reason: str) -> None:
    """Marks a span as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, reason))


class _OnceInAWhile(logging.Filter):
    """A collector may be away for days: each kind of failure is said once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._said.get(record.msg, -SAY_AGAIN_SECONDS) < SAY_AGAIN_SECONDS:
            return False
        self._said[record.msg] = now
        return True
