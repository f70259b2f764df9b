"""An HTTP/1.1 connection to a worker: asyncio protocol and httptools parser.

A `Connection` carries one exchange at a time: `start` writes the request, `head` waits for the status
line and headers, `read` yields body bytes as they came, and `finish` says whether the connection may carry
the next one. Closing is also how a worker learns that its client has gone.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Literal, Protocol, cast

import httptools

from gateway.deadline import Deadline

HIGH_WATER = 256 * 1024  # bytes of one response held here before the worker is made to wait
JOIN_BELOW = 64 * 1024  # a smaller body goes out in one piece with its head
_READ = frozenset(
    {
        b"content-type", b"content-length", b"content-encoding", b"cache-control", b"retry-after",
        b"transfer-encoding", b"x-pagefleet-refused",
        b"x-pagefleet-usage",
    }
)  # fmt: skip


class Timeouts(Protocol):
    """Seconds. `first_byte`: until a stream's head; `idle`: between two pieces of a body; `total`: for all of
    it."""

    @property
    def connect(self) -> float: ...
    @property
    def first_byte(self) -> float: ...
    @property
    def idle(self) -> float: ...
    @property
    def total(self) -> float: ...


class UpstreamError(Exception):
    """The exchange failed. `untouched`: the worker can't have begun on it, so it may be sent again.
    "exhausted": this process has no more descriptors, ports or memory for a connection; no worker's fault."""

    def __init__(
        self,
        kind: Literal["connect", "exhausted", "timeout", "broken", "protocol"],
        message: str,
        *,
        untouched: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.untouched = untouched


class Connection(asyncio.Protocol):
    """One connection to a worker and the exchange on it."""

    # More than thirty attributes, past which those of plain objects are no longer fast to reach.
    __slots__ = (
        "_any_byte", "_buffered", "_busy", "_chunked", "_chunks", "_deadline", "_ends_at", "_error",
        "_head_done", "_head_within", "_keep_alive", "_loop", "_moved_at", "_on_lost", "_parser",
        "_paused", "_reset_by_worker", "_sink", "_timeouts", "_transport", "_waiter", "address",
        "closed", "complete", "content_length", "content_type", "head_at", "lines", "on_body", "refused",
        "reused", "status", "usage",
    )  # fmt: skip

    def __init__(
        self,
        address: str,
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.address = address
        self.reused = False
        self.closed = False
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append  # what the parser calls for every event of a stream
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._busy = False
        self._keep_alive = False
        self._reset_by_worker = False
        self._deadline = Deadline(self._loop, self._on_late)
        self._forget_exchange()

    def _forget_exchange(self) -> None:
        self._forget_head()
        self.status = 0
        self.head_at = 0.0
        self.complete = False
        self._head_done = False
        self._any_byte = False
        self._paused = False
        self._chunks.clear()
        self._buffered = 0  # bytes that wait in `_chunks`, with their framing
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None

    def _forget_head(self) -> None:
        self.lines = b""
        self.content_length: int | None = None
        self.content_type = b""
        self.refused = b""
        self.usage = b""
        self._chunked = False

    # --- the exchange, as the proxy sees it

    def start(self, head: bytes, body: bytes, timeouts: Timeouts, head_within: float, ends_at: float) -> None:
        """Writes the request. `head_within`: seconds to the response's head; `ends_at`: loop time at which
        the exchange is over in any case."""
        self._forget_exchange()
        self._busy = True
        self._timeouts = timeouts
        self._head_within = head_within
        self._ends_at = ends_at
        self._moved_at = self._loop.time()
        self._deadline.set(min(ends_at, self._moved_at + min(head_within, timeouts.idle)))
        if len(body) < JOIN_BELOW:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def head(self) -> None:
        """Waits until `status` and `lines`, the headers that go on to the client, are there."""
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    def at_hand(self) -> bytes:
        """What `read` would return without waiting, if that is simple; else b""."""
        return self._taken() if self._chunks and not self._paused else b""

    async def read(self) -> bytes:
        """All body bytes that came since the last call, at least one; b"" at the end.

        What came before a failure is delivered before the failure is raised.
        """
        while not self._chunks:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        data = self._taken()
        if self._paused:
            self._paused = False
            self._moved_at = self._loop.time()
            if not self.closed:
                self._transport.resume_reading()
        return data

    async def pass_on(self, sink: Callable[[bytes], bool]) -> None:
        """Gives body bytes to `sink` as they come, which saves waking this task for each piece of a stream.

        Until `sink` returns False, as it can take no more now, or there is something that `read` must tell:
        the last bytes, the end, a failure.
        """
        if self.complete or self._chunks or self._error is not None:
            return
        self._sink = sink
        try:
            await self._wait()
        finally:
            self._sink = None

    def _taken(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        return data

    @property
    def pending(self) -> bool:
        """Whether `read` would return bytes at once."""
        return bool(self._chunks)

    def _wait(self) -> asyncio.Future[None]:
        self._waiter = self._loop.create_future()
        return self._waiter

    def finish(self) -> bool:
        """Ends the exchange; whether the connection may carry another one."""
        self._busy = False
        reusable = (
            self.complete
            and self._keep_alive
            and self._error is None
            and not self.closed
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )
        self._chunks.clear()
        if reusable and self._paused:
            self._transport.resume_reading()
        return reusable

    def close(self) -> None:
        """At once, without waiting for what is still unsent."""
        self.closed = True
        self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self.close()  # nothing was asked: whatever this is, it isn't the answer to the next request
            return
        self._any_byte = True
        self._moved_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            if not self.complete:  # else: bytes beyond the declared length; the answer itself is whole
                self._fail(UpstreamError("protocol", f"invalid HTTP from the worker: {error}"))
                self.close()
        if self._chunks:
            sink = self._sink
            if sink is not None and not self.complete and self._error is None:
                if sink(self._taken()):
                    return
            else:
                self._buffered += len(data)
                if self._buffered > HIGH_WATER and not self._paused and not self.closed:
                    self._paused = True
                    self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        raw = self._transport.get_extra_info("socket")
        pending = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if raw is not None else 0
        # A closed socket answers data with a reset: then nobody has read the request.
        self._reset_by_worker = pending != 0
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._deadline.cancel()
        if self._busy and not self.complete:
            unread = self._reset_by_worker or isinstance(exc, (ConnectionResetError, BrokenPipeError))
            self._fail(
                UpstreamError(
                    "broken", "the worker closed the connection", untouched=unread and not self._any_byte
                )
            )
            self._wake()
        self._on_lost(self)

    # --- httptools

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("data after the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _READ or self._head_done:
            return
        if name == b"transfer-encoding":
            self._chunked = value.strip().lower() == b"chunked"
        elif name == b"x-pagefleet-refused":
            self.refused = value
        elif name == b"x-pagefleet-usage":
            self.usage = value
        else:
            if name == b"content-length":
                self.content_length = int(value)
            elif name == b"content-type":
                self.content_type = value
            self.lines += b"%b: %b\r\n" % (name, value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise ValueError("the worker switched protocols")
            self._forget_head()  # what an interim answer says isn't the answer's
            return
        framed = self._chunked or self.content_length is not None or status in (204, 304)
        if not framed:  # would end with the connection, and a crash would look like the end
            raise ValueError("a response without Content-Length that isn't chunked")
        self.status = status
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()
        self.head_at = time.perf_counter()

    def on_message_complete(self) -> None:
        if self._head_done:
            self.complete = True

    # --- timers and failures

    def _on_late(self) -> None:
        """Pieces that came since move the limit only here."""
        if not self._busy:
            return
        now = self._loop.time()
        if self._paused:
            self._moved_at = now  # the client is the slow one; its own socket has a time limit
        limit = self._timeouts.idle if self._head_done else self._head_within
        due = min(self._ends_at, self._moved_at + limit)
        if now < due:
            self._deadline.set(due)
            return
        if now >= self._ends_at:
            what = f"did not finish within {self._timeouts.total:g} s (gateway.timeouts.total)"
        elif self._head_done:
            what = f"sent nothing for {limit:g} s (gateway.timeouts.idle)"
        else:
            what = f"did not answer within {limit:g} s (gateway.timeouts.first_byte)"
        self._fail(UpstreamError("timeout", what))
        self.close()
        self._wake()

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
