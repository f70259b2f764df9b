"""A collector for OpenTelemetry's spans: a real HTTP server that decodes what exporters send."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span. Ids are hex as in headers, times Unix ns; `resource` says which process sent it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool


class Collector:
    """`status`: what it answers; `delay`: seconds before that; `bodies`: raw, as they came."""

    def __init__(self) -> None:
        self.status = 200
        self.delay = 0.0
        self.spans: list[Received] = []
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        self.bodies.append(body)
        if self.status == 200:
            self.spans += _decode(body)

    def of(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, count: int, trace_id: str | None = None, seconds: float = 60.0) -> list[Received]:
        """The spans (of a trace), once there are so many."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.spans if trace_id is None else self.of(trace_id)
            if len(found) >= count:
                return sorted(found, key=lambda span: (span.start, -span.end))
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


@contextmanager
def collector() -> Iterator[Collector]:
    """One that runs; its `url` has no path, as people write it."""
    state = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(state.delay)
            state.take(self.path, body)
            self.send_response(state.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _decode(body: bytes) -> Iterator[Received]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    resource=_attributes(resource.resource.attributes),
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
