"""One request of a client and its answer: ASGI's `receive` and `send`, made for a proxy's hot path.

What ASGI leaves open is so here: a head waits for the first piece of its body, so that both leave in one
system call (an empty piece sends it at once); `on_leave` is called when the client goes, so nobody has to
wait for that in a task of its own; an answer that its application leaves unfinished ends with the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Protocol

from gateway.asgi import Headers, Message, Receive, Scope, Send

JOIN_BELOW = 64 * 1024  # a larger piece isn't copied to leave together with the head
TAIL = 16  # bytes: enough to see the end of an event or a line, and the event that ends a stream

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_BODILESS = (204, 304)

log = logging.getLogger(__name__)


class Wire(Protocol):
    """What an exchange needs of the connection it is on. `default_lines`: headers of every answer; `write`
    never waits."""

    loop: asyncio.AbstractEventLoop
    write_paused: bool

    @property
    def write(self) -> Callable[[bytes], None]: ...

    @property
    def default_lines(self) -> bytes: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...
    def resume_reading(self) -> None: ...
    def answered(self, exchange: Exchange) -> None: ...


class Exchange:
    """Its own scope has it as `exchange`.

    `keep_alive`: whether the connection may carry another one after it; `upgrade`: another protocol was asked
    for; `on_leave`: called once, when the client leaves before its answer is complete; `buffered`: bytes of
    the body that nobody took yet; `tail`: the last bytes of the answer's body so far.
    """

    __slots__ = (
        "_bodiless", "_body_ended", "_chunked", "_expects_continue", "_head", "_left", "_pieces", "_waiter",
        "_wire", "buffered", "complete", "disconnected", "keep_alive", "loop", "on_leave", "scope", "started",
        "tail", "task", "upgrade",
    )  # fmt: skip

    def __init__(self, wire: Wire, scope: Scope, keep_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        scope["exchange"] = self
        self.keep_alive = keep_alive
        self.upgrade = False
        self.on_leave: Callable[[], None] | None = None
        self.buffered = 0
        self.disconnected = False
        self.started = False
        self.tail = b""
        self.complete = False
        self.task: asyncio.Task[None] | None = None
        self.loop = wire.loop
        self._wire = wire
        self._expects_continue = expects_continue
        self._pieces: list[bytes] = []
        self._body_ended: bool | None = False  # None: that was told too
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""
        self._chunked = False
        self._bodiless = False
        self._left = -1  # bytes of the answer's body that are due; negative: it has no length

    async def run(self, app: App, task: asyncio.Task[None]) -> None:
        """Serves the request, in `task`; never raises but CancelledError."""
        self.task = task
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("error behind the beginning of an answer")
        finally:
            if not self.complete and not self.disconnected:
                self._wire.close()
            self.scope = {}  # it holds this exchange
            self.task = None

    # --- from the connection

    def feed(self, data: bytes) -> None:
        """A piece of the request's body. What comes after the answer is dropped."""
        if not self.complete:
            self._pieces.append(data)
            self.buffered += len(data)
            if self._waiter is not None:
                self._wake()

    def feed_end(self) -> None:
        self._body_ended = True
        if self._waiter is not None:
            self._wake()

    def leave(self) -> None:
        """The client has gone, or was told something else than this answer."""
        if self.disconnected or self.complete:
            return
        self.disconnected = True
        self._wake()
        if self.on_leave is not None:
            self.on_leave()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- from the application

    async def receive(self) -> Message:
        """What has come of the body, at least a piece or its end; after that, that the client has left."""
        if self._expects_continue:
            self._expects_continue = False
            if not self.started:
                self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._wire.resume_reading()
        while not (self.disconnected or self.complete):
            if self._pieces or self._body_ended:
                return self._taken()
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return {"type": "http.disconnect"}

    def whole_body(self, most: int) -> bytes | None:
        """All of the body, if it has come and is not longer than that; else `receive` has it. It mostly has,
        and this is a fraction of what `receive` takes."""
        if not self._body_ended or self.buffered > most or self._expects_continue or self.disconnected:
            return None
        self._wire.resume_reading()
        self._body_ended = None
        return self._taken_pieces()

    def _taken(self) -> Message:
        more = not self._body_ended
        if not more:
            self._body_ended = None
        return {"type": "http.request", "body": self._taken_pieces(), "more_body": more}

    def _taken_pieces(self) -> bytes:
        pieces, self._pieces, self.buffered = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send(self, message: Message) -> None:
        """Waits while the client doesn't take what it was sent. For one who has left, nothing is done."""
        if self._wire.write_paused:
            await self._wire.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"], message.get("lines", b""))
        else:
            self._write(message["body"], message.get("more_body", False))

    async def write(self, body: bytes, more: bool) -> None:
        """A piece of the body, with all that `send` does."""
        if self._wire.write_paused:
            await self._wire.drain()
        self.put(body, more)

    @property
    def held_up(self) -> bool:
        """Whether the client should be waited for, as `write` does and `put` doesn't."""
        return self._wire.write_paused

    def put(self, body: bytes, more: bool) -> None:
        """A piece of the body, without waiting."""
        if not self.disconnected:
            self._write(body, more)

    def pass_on(self, piece: bytes) -> bool:
        """One more piece of a body that goes on, sent without waiting; False when the client should be waited
        for now."""
        if not self.disconnected:
            self._write(piece, True)
        return not self._wire.write_paused

    def _begin(self, status: int, headers: Headers, lines: bytes) -> None:
        length, own = None, []
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.keep_alive = False  # this gateway says nothing but "close" with it
                continue
            own.append(b"%b: %b\r\n" % (name, value))
        block = b"".join(own)
        if block.count(b"\n") != len(own) or block.count(b"\r") != len(own) or b"\0" in block:
            raise RuntimeError("a header would have become two")
        self.begin(status, block + lines, length)

    def begin(self, status: int, lines: bytes, length: int | None) -> None:
        """The answer's head, without waiting. `lines`: whole header lines, known to be good, that say nothing
        of the connection; `length`: what they say of the body's, None: nothing."""
        if self.started:
            raise RuntimeError("two heads for one request")
        self.started = True
        coding = b""
        if self.scope["method"] == "HEAD" or status in _BODILESS:
            self._bodiless = True
        elif length is not None:
            self._left = length
        elif self.scope["http_version"] == "1.1":  # in 1.0 the connection's end ends a body without length
            self._chunked = True
            coding = b"transfer-encoding: chunked\r\n"
        self._head = b"%b%b%b%b%b" % (
            _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status,
            self._wire.default_lines,
            lines,
            coding,
            b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n",
        )

    def _write(self, body: bytes, more: bool) -> None:
        if not self.started or self.complete:
            raise RuntimeError("a body before its head or after its end")
        self.tail = body[-TAIL:] if len(body) >= TAIL else (self.tail + body)[-TAIL:]
        if self._bodiless:
            body = b""
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self._left >= 0:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("a body that isn't as long as its head says")
        if self._head:
            head, self._head = self._head, b""
            if len(body) < JOIN_BELOW:
                body = head + body
            else:
                self._wire.write(head)
        if body:
            self._wire.write(body)
        if not more:
            self.complete = True
            if self.buffered:
                self._taken_pieces()  # nobody reads them any more
            if self._waiter is not None:
                self._wake()
            self._wire.answered(self)
