"""The gateway's side of a client's connection: HTTP/1.1 over httptools, with what an open port needs.

uvicorn runs the server (sockets, signals, graceful end); its own protocol is not used: it costs twice as much
for each request, and knows no bounded heads, no time limits and no JSON errors.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from contracts.errors import ApiError
from gateway import errors
from gateway.asgi import Headers, Scope
from gateway.deadline import Deadline
from gateway.exchange import Exchange

MAX_HEAD = 64 * 1024  # bytes of request line and headers
HEAD_SECONDS = 30.0  # in which a request's head must arrive
LINGER_SECONDS = 2.0
LAST_CALL_SECONDS = 1.0  # for idle connections of a process that ends
LAST_LOOK_SECONDS = 0.05
PIPELINE_LIMIT = 8
BODY_SECONDS = 60.0  # in which a body may come as slowly as its client likes
SLOWEST_BODY = 1024  # bytes a second, after that and on average
LONG_URL = 256  # bytes; not worth remembering
HIGH_WATER = 64 * 1024  # bytes of a body that wait for the application before the client is made to wait

_OWN = frozenset((b"expect", b"host", b"transfer-encoding", b"upgrade"))
_ASGI = {"version": "3.0", "spec_version": "2.3"}


@lru_cache(maxsize=256)
def _split(url: bytes) -> tuple[str, bytes]:
    """Path and query. ValueError or an error of the parser for what has none."""
    path, _, query = url.partition(b"?")
    if path[:1] != b"/" or b"#" in url:
        parsed = httptools.parse_url(url)
        path, query = parsed.path, parsed.query or b""
    text = path.decode("ascii")
    return unquote(text) if "%" in text else text, query


class ClientProtocol(asyncio.Protocol):
    """JSON errors, a bounded head, requests that must arrive in time, and a disconnect that is seen at once,
    also when more requests were pipelined behind the running one.

    `silence`: seconds that may pass between two pieces of a body. The other arguments are uvicorn's.
    """

    # More than thirty attributes, past which those of plain objects are no longer fast to reach.
    __slots__ = (
        "_app", "_asked", "_body_moved", "_body_since", "_body_size", "_client", "_coded", "_deadline",
        "_default_headers", "_default_lines", "_drained", "_expects_continue", "_framing_size", "_gone",
        "_head_open", "_head_size", "_headers", "_hosts", "_keep_alive", "_latest", "_leaving",
        "_looked", "_odd_coding", "_parser", "_piece_size", "_queue", "_read_paused", "_refused",
        "_running", "_server", "_server_state", "_silence", "_started", "_task", "_transport",
        "_upgrade", "_url", "loop", "write_paused",
    )  # fmt: skip

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        silence: float,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.write_paused = False
        self._app = config.loaded_app
        self._keep_alive: float = config.timeout_keep_alive
        self._server_state = server_state
        self._silence = silence
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_data_after_close=True
        )  # else such a request gets no answer
        self._transport: asyncio.Transport
        self._read_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._running: Exchange | None = None  # the one that is answered
        self._latest: Exchange | None = None  # the one whose body is read
        self._queue: deque[Exchange] = deque()
        self._task: asyncio.Task[None] | None = None  # runs the exchanges
        self._started: asyncio.Future[None] | None = None
        self._gone = False
        self._default_headers: Headers | None = None
        self._default_lines = b""
        self._asked = False  # a request has begun that isn't whole yet
        self._head_open = True
        self._refused = False
        self._leaving = False
        self._looked = False
        self._head_size = 0  # of the pieces before the one that is parsed
        self._piece_size = 0
        self._body_moved = False  # in the piece that is parsed
        self._framing_size = 0  # of the pieces since the body last moved: chunk extensions, trailers
        self._body_size = 0  # of the pieces that hold it
        self._body_since = 0.0  # loop time since which they are waited for; 0: none has come yet
        self._deadline = Deadline(self.loop, self._on_late)  # until when something must have come

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        self._client = get_remote_addr(self._transport)
        self._server = get_local_addr(self._transport)
        self._expect_within(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._deadline.cancel()
        self.resume_writing()
        self._gone = True
        running, self._running, self._latest = self._running, None, None
        self._queue.clear()
        if running is not None:
            running.leave()
        self._wake()

    def eof_received(self) -> bool:
        return False  # who sends no more reads no more either

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._piece_size = len(data)
        self._body_moved = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered like any request, by what it says it wants; what follows would be in another protocol.
            if self._latest is not None:
                self._latest.keep_alive = False
        except httptools.HttpParserError:
            too_large = self._head_size > MAX_HEAD
            self._refuse(errors.headers_too_large(MAX_HEAD) if too_large else errors.invalid_http())
            return
        if self._asked and not self._head_open:
            self._framing_size = 0 if self._body_moved else self._framing_size + len(data)
            if self._framing_size > MAX_HEAD:
                self._refuse(errors.headers_too_large(MAX_HEAD))
                return
            self._expect_body(len(data))
        elif self._asked or not self._serving:
            if not self._head_size:
                self._expect_within(HEAD_SECONDS)
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse(errors.headers_too_large(MAX_HEAD))

    # --- httptools

    def on_message_begin(self) -> None:
        self._asked = self._head_open = True
        self._looked = False
        self._head_size = self._framing_size = self._body_size = self._hosts = 0
        self._body_since = 0.0
        self._url = b""
        self._headers: Headers = []
        self._expects_continue = self._coded = self._odd_coding = self._upgrade = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_open:  # a trailer: it comes too late to say who asks for what
            return
        name = name.lower()
        self._headers.append((name, value))
        if name in _OWN:
            if name == b"host":
                self._hosts += 1
            elif name == b"expect":
                self._expects_continue = value.lower() == b"100-continue"
            elif name == b"upgrade":
                self._upgrade = True
            elif value.lower() == b"chunked":
                self._coded = True
            else:
                # The parser takes nothing else off: `gzip, chunked` would be passed on as if it were JSON.
                self._odd_coding = True

    def on_headers_complete(self) -> None:
        if self._head_size + self._piece_size > MAX_HEAD:
            self._head_size = len(self._url) + sum(
                len(name) + len(value) + 4 for name, value in self._headers
            )
            if self._head_size > MAX_HEAD:
                raise ValueError("head too large")
        parser = self._parser
        version = parser.get_http_version()
        if self._odd_coding or version not in ("1.1", "1.0") or (self._coded and version == "1.0"):
            raise ValueError("not what this server speaks")
        if self._hosts > 1 or (not self._hosts and version == "1.1"):  # RFC 9112, 3.2
            raise ValueError("not one host")
        self._head_open = False
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self._leaving
        expects_continue = self._expects_continue and version == "1.1"
        exchange = Exchange(self, self._scope(version), keep_alive, expects_continue)
        exchange.upgrade = self._upgrade
        self._latest = exchange
        if not self._serving:
            self._start(exchange)
            return
        self._queue.append(exchange)
        if len(self._queue) >= PIPELINE_LIMIT:
            self._pause_reading()

    def _scope(self, version: str) -> Scope:
        path, query = _split(self._url) if len(self._url) < LONG_URL else _split.__wrapped__(self._url)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "query_string": query,
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
        }

    def on_body(self, body: bytes) -> None:
        self._body_moved = True
        exchange = self._latest
        if exchange is not None:
            exchange.feed(body)
            if exchange.buffered > HIGH_WATER:
                self._pause_reading()

    def on_message_complete(self) -> None:
        self._asked = False
        self._head_size = 0
        self._deadline.clear()
        if self._latest is not None:
            self._latest.feed_end()
        if not self._serving:  # it was answered before its end
            self._expect_within(self._keep_alive)

    # --- exchanges, one after the other

    @property
    def _serving(self) -> bool:
        return self._running is not None and not self._running.complete

    def _start(self, exchange: Exchange) -> None:
        self._running = exchange
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run())
            self._server_state.tasks.add(self._task)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    async def _run(self) -> None:
        """All exchanges of the connection, one after the other: a task for each would cost more."""
        assert self._task is not None
        served: Exchange | None = None
        try:
            while not self._gone:
                exchange = self._running
                if exchange is None or exchange is served:
                    self._started = self.loop.create_future()
                    await self._started
                else:
                    served = exchange
                    await exchange.run(self._app, self._task)
        finally:
            self._server_state.tasks.discard(self._task)

    def answered(self, exchange: Exchange) -> None:
        """The last piece of its answer was written."""
        self._server_state.total_requests += 1
        if not exchange.keep_alive:
            self._transport.close()
            return
        self._resume_reading()
        if self._queue:
            self._start(self._queue.popleft())
        elif not self._asked:
            self._expect_within(self._keep_alive)

    def shutdown(self) -> None:
        """Called by uvicorn when the process is to end: the next answer is the connection's last and says so.

        An idle connection isn't closed at once: its client may have just asked, and would be reset.
        """
        self._leaving = True
        self._keep_alive = LAST_CALL_SECONDS
        if self._serving:
            if self._latest is not None and not self._latest.started:
                self._latest.keep_alive = False
        elif not self._asked:
            self._expect_within(LAST_CALL_SECONDS)

    # --- for the exchange

    @property
    def default_lines(self) -> bytes:
        headers = self._server_state.default_headers  # uvicorn makes a new list every second
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        return self._default_lines

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    async def drain(self) -> None:
        """Until the client has taken most of what was written, or has gone."""
        while self.write_paused:
            self._drained = self.loop.create_future()
            await self._drained

    def body_taken(self) -> None:
        self._resume_reading()

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused and not self._transport.is_closing():
            self._read_paused = False
            self._body_since = 0.0  # what the client could not send meanwhile isn't its fault
            self._transport.resume_reading()

    # --- time limits, refusals

    def _expect_within(self, seconds: float) -> None:
        self._deadline.set(self.loop.time() + seconds)

    def _expect_body(self, size: int) -> None:
        """A piece of the body came, and more must: soon, and all of it at a rate, or a client could keep this
        up for as long as it likes."""
        now = self.loop.time()
        self._body_since = self._body_since or now
        self._body_size += size
        most = self._body_since + BODY_SECONDS + self._body_size / SLOWEST_BODY
        self._deadline.set(min(now + self._silence, most))

    def _on_late(self) -> None:
        if self._refused:
            self._transport.close()
        elif self._read_paused or (self._serving and (self._head_open or self._latest is not self._running)):
            self._expect_within(self._silence)  # what is missing isn't the client's fault, or nobody's loss
        elif self._asked:
            self._refuse(self._too_late())
        elif self._looked:
            self._transport.close()
        else:  # what the client sent meanwhile may lie in the socket of a loop that was busy
            self._looked = True
            self._expect_within(LAST_LOOK_SECONDS)

    def _too_late(self) -> ApiError:
        if self._head_open:
            return errors.request_timeout(HEAD_SECONDS)
        if self._body_since and self.loop.time() - self._body_since > BODY_SECONDS:
            return errors.body_too_slow(SLOWEST_BODY)
        return errors.request_timeout(self._silence)

    def _refuse(self, error: ApiError) -> None:
        """Says why and takes nothing more; a client that still sends has a moment to read it."""
        running = self._running
        if running is not None and not running.complete:
            own_body = self._asked and not self._head_open and running is self._latest
            if running.started or not own_body:
                self._transport.close()  # another answer is on its way: this one can't go into it
                return
            running.leave()
        body = msgspec.json.encode(error.body())
        self._transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), body)
        )
        self._refused = True
        self._transport.write_eof()
        self._expect_within(LINGER_SECONDS)
