"""The gateway's side of a client's connection: uvicorn's HTTP/1.1 protocol with what an open port needs."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contracts.errors import ApiError
from gateway import errors

MAX_HEAD = 64 * 1024  # bytes of request line and headers
HEAD_SECONDS = 30.0  # in which a request's head must arrive
LINGER_SECONDS = 2.0
PIPELINE_LIMIT = 8


class ClientProtocol(HttpToolsProtocol):
    """JSON errors, a bounded head, requests that must arrive in time, and a disconnect that is seen also when
    more requests were pipelined behind the running one.

    `silence`: seconds that may pass between two pieces of a body.
    """

    def __init__(self, *args: Any, silence: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silence = silence
        self._running: RequestResponseCycle | None = None
        self._head_open = True
        self._incomplete = True
        self._refused = False
        self._head_size = 0
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, CorkedTransport(transport, self.loop)))
        self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if not self._incomplete and self._is_serving():
            return
        if self._refused or self.transport.is_closing():
            return
        self._moved_at = self.loop.time()
        if self._head_open:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self.send_400_response("")
                return
        if self._timer is None and self.timeout_keep_alive_task is None:
            self._timer = self.loop.call_later(HEAD_SECONDS if self._head_open else self._silence, self._late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = self._incomplete = True
        self._head_size = 0

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._stop_timer()
        self._head_size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_size > MAX_HEAD:
            raise ValueError("head too large")
        if self.parser.get_http_version() not in ("1.0", "1.1") or not _only_chunked(self.headers):
            raise ValueError("not what this server speaks")
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) < PIPELINE_LIMIT:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._incomplete = False
        self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(
            cycle, app if cycle.scope["http_version"] == "1.1" else _until_close(app, cycle)
        )

    def _is_serving(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """The rest of a request is due."""
        self._timer = None
        queued = self._is_serving() and self._running is not self.cycle
        rest = self._moved_at + self._silence - self.loop.time()
        if queued or self.flow.read_paused:
            self._timer = self.loop.call_later(self._silence, self._late)
        elif not self._head_open and rest > 0:
            self._timer = self.loop.call_later(rest, self._late)
        elif not self._incomplete or not self._head_size:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(errors.request_timeout(HEAD_SECONDS if self._head_open else self._silence))

    def send_400_response(self, msg: str) -> None:
        too_large = self._head_size > MAX_HEAD
        self._refuse(errors.headers_too_large(MAX_HEAD) if too_large else errors.invalid_http())

    def _refuse(self, error: ApiError) -> None:
        """Says why and takes nothing more; a client that still sends has a moment to read it."""
        running = self._running
        own_body = self._incomplete and not self._head_open and running is self.cycle
        if running is not None and self._is_serving():
            if not own_body or running.response_started:
                self.transport.close()  # another answer is on its way: this one can't go into it
                return
            running.disconnected = True
            running.message_event.set()
        body = msgspec.json.encode(error.body())
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), body)
        )
        self._refused = True
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _only_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a body comes in no other coding than chunked, which the parser takes off: `gzip, chunked` would
    be passed on as if it were JSON."""
    return all(value.lower() == b"chunked" for name, value in headers if name == b"transfer-encoding")


def _until_close(app: Any, cycle: RequestResponseCycle) -> Any:
    """Answers of HTTP/1.0: it knows no chunks, the end of the connection ends a stream."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def send_plain(message: Any) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return application


class CorkedTransport:
    """Joins what is written in one turn of the event loop: head and body leave in one system call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def _flush(self) -> None:
        if self._pending:
            data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
            self._pending.clear()
            self._transport.write(data)

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
