"""The gateway's side of a client's connection: HTTP/1.1 over httptools, with what an open port needs.

uvicorn runs the server (sockets, signals, graceful end); its own protocol is not used: it costs twice as much
for each request, and knows no bounded heads, no time limits and no JSON errors.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import sys
import termios
from collections import deque
from typing import Any, cast

import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from contracts import heads
from contracts.errors import ApiError
from gateway import errors
from gateway.asgi import Headers, Scope
from gateway.deadline import Deadline
from gateway.exchange import Exchange
from gateway.request_reader import RequestReader

LAST_CALL_SECONDS = 1.0  # for idle connections of a process that ends
LEAVING_SECONDS = 0.5  # between two looks for a client's leaving while nothing is read
PIPELINE_LIMIT = 8
MOST_BEHIND = 32 * 1024  # bytes that may lie unread behind a request that runs; a TCP window holds more
MOST_UNREAD = 8 * 1024**2  # bytes that may come although nobody takes them: behind an answer, or a refusal
HIGH_WATER = 64 * 1024  # bytes of a body that wait for the application before the client is made to wait


def has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed, behind bytes that nobody has read yet."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def unread(connection: socket.socket) -> int:
    """Bytes that have come and that nobody has read yet."""
    count = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


class ClientProtocol(asyncio.Protocol):
    """JSON errors, a bounded head, requests that must arrive in time, and a disconnect that is seen at once,
    also when more requests were pipelined behind the running one.

    `silence`: seconds that may pass between two pieces of a body. The other arguments are uvicorn's.
    """

    __slots__ = (
        "_app", "_body_since", "_body_size", "_deadline", "_default_headers", "_default_lines", "_drained",
        "_dropped", "_gone", "_keep_alive", "_latest", "_leave_look", "_leaving", "_looked", "_queue",
        "_read_paused", "_reader", "_refusal", "_running", "_server_state", "_silence", "_started", "_task",
        "_transport", "loop", "write", "write_paused",
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
        self._reader: RequestReader
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
        self._refusal: ApiError | None = None  # of what came last: nothing more is taken
        self._dropped = 0  # bytes that came after that
        self._leaving = False
        self._looked = False
        self._body_size = 0  # of the pieces that hold it
        self._body_since = 0.0  # loop time since which they are waited for; 0: none has come yet
        self._leave_look = Deadline(self.loop, self._look_for_leaving)  # while nothing is read
        self._deadline = Deadline(self.loop, self._on_late)  # until when something must have come

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write  # itself: it is called for every piece of every stream
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        client, server = get_remote_addr(self._transport), get_local_addr(self._transport)
        self._reader = RequestReader(self, client, server)
        self._expect_within(heads.HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._deadline.cancel()
        self._leave_look.cancel()
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
        if self._refusal is not None:
            self._drop(len(data))
            return
        reader = self._reader
        try:
            reader.feed(data)
        except ApiError as error:
            self._refuse(error)
            return
        if reader.asked and not reader.in_head:
            self._expect_body(len(data))
        elif reader.began and (reader.asked or not self._serving):
            self._expect_within(heads.HEAD_SECONDS)

    # --- for the reader

    def on_head(self, scope: Scope, keep_alive: bool, expects_continue: bool, upgrade: bool) -> None:
        self._looked = False
        self._body_size = 0
        self._body_since = 0.0
        exchange = Exchange(self, scope, keep_alive and not self._leaving, expects_continue)
        exchange.upgrade = upgrade
        self._latest = exchange
        if not self._serving:
            self._start(exchange)
            return
        self._queue.append(exchange)
        if len(self._queue) >= PIPELINE_LIMIT:
            self._pause_reading()

    def on_body(self, body: bytes) -> None:
        exchange = self._latest
        if exchange is not None:
            exchange.feed(body)
            if exchange.buffered > HIGH_WATER:
                self._pause_reading()

    def on_end(self) -> None:
        self._deadline.clear()
        if self._latest is not None:
            self._latest.feed_end()
        if not self._serving:  # it was answered before its end
            self._expect_within(self._keep_alive)

    def on_other_protocol(self) -> None:
        if self._latest is not None:
            self._latest.keep_alive = False

    # --- exchanges, one after the other

    @property
    def _serving(self) -> bool:
        return self._running is not None and not self._running.complete

    @property
    def _reads_running(self) -> bool:
        """Whether what comes, if anything does, is the body of the request that is answered."""
        return self._reader.asked and not self._reader.in_head and self._latest is self._running

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
        self.resume_reading()
        if self._queue:
            self._start(self._queue.popleft())
        elif self._refusal is not None:
            self._say(self._refusal)
        elif not self._reader.asked:
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
        elif not self._reader.asked:
            self._expect_within(LAST_CALL_SECONDS)

    # --- for the exchange

    @property
    def default_lines(self) -> bytes:
        headers = self._server_state.default_headers  # uvicorn makes a new list every second
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        return self._default_lines

    def close(self) -> None:
        self._transport.close()

    async def drain(self) -> None:
        """Until the client has taken most of what was written, or has gone."""
        while self.write_paused:
            self._drained = self.loop.create_future()
            await self._drained

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()
            self._leave_look.set(self.loop.time() + LEAVING_SECONDS)

    def _look_for_leaving(self) -> None:
        """A client's end lies behind what isn't read, and is found by asking the kernel, as long as
        that leaves the client room to send its end."""
        if not self._read_paused or self._transport.is_closing():
            return
        connection = self._transport.get_extra_info("socket")
        if has_left(connection):
            self._transport.abort()
        elif self._serving and not self._reads_running and unread(connection) > MOST_BEHIND:
            self._refuse(errors.pipelined_too_much(MOST_BEHIND))
            self.resume_reading()
        else:
            self._leave_look.set(self.loop.time() + LEAVING_SECONDS)

    def _drop(self, size: int) -> None:
        """What comes behind a refusal is read, so that the client's end is seen, but not for ever."""
        self._dropped += size
        if self._serving and self._dropped > MOST_UNREAD:
            self._transport.abort()

    def resume_reading(self) -> None:
        """There is room again for more of a body, or for another request."""
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
        if self._body_size > MOST_UNREAD and self._latest is not None and self._latest.complete:
            self._transport.close()  # nobody reads them
            return
        most = heads.body_deadline(self._body_since, self._body_size)
        self._deadline.set(min(now + self._silence, most))

    def _on_late(self) -> None:
        if self._refusal is not None and not self._serving:
            self._transport.close()
        elif self._read_paused or (self._serving and not self._reads_running):
            self._expect_within(self._silence)  # what is missing isn't the client's fault, or nobody's loss
        elif self._reader.asked:
            self._refuse(self._too_late())
        elif self._looked:
            self._transport.close()
        else:  # what the client sent meanwhile may lie in the socket of a loop that was busy
            self._looked = True
            self._expect_within(heads.LAST_LOOK_SECONDS)

    def _too_late(self) -> ApiError:
        if self._reader.in_head:
            return heads.request_timeout(heads.HEAD_SECONDS)
        if self._body_since and self.loop.time() - self._body_since > heads.BODY_SECONDS:
            return heads.body_too_slow()
        return heads.request_timeout(self._silence)

    def _refuse(self, error: ApiError) -> None:
        """Takes nothing more, and says why, once what was asked before has been answered."""
        self._refusal = error
        running = self._running
        if self._serving and running is not None:
            if not self._reads_running:
                if self._reader.asked and not self._reader.in_head:
                    self._queue.pop()  # the rest of its body never comes
                return
            if running.started:
                self._transport.close()  # its answer is on its way: this one can't go into it
                return
            running.leave()
        self._say(error)

    def _say(self, refusal: ApiError) -> None:
        """A client that still sends has a moment to read it."""
        self._transport.write(heads.last_answer(refusal))
        self._transport.write_eof()
        self._expect_within(heads.LINGER_SECONDS)
