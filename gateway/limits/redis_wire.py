"""A connection to Redis with one command under way: what every limited request waits for.

The client library makes the connection (address, TLS, credentials, database, sentinels); `take_over` puts
this protocol in the place of its streams, which take several times as much for a command: a lock, two tasks,
a timer and a parser of all that Redis may say, where one kind of answer comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from redis.exceptions import InvalidResponse, NoScriptError, ResponseError

from gateway.deadline import Deadline

LONGEST_ANSWER = 1 << 20  # bytes
LAST_LOOK_S = 0.001
_END = b"\r\n"

Done = Callable[[bytes | Exception], None]


class Wire(asyncio.Protocol):
    """`closed`: nothing can be asked any more."""

    def __init__(self, transport: asyncio.Transport, before: asyncio.BaseProtocol) -> None:
        self.closed = transport.is_closing()
        self._transport = transport
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._done: Done | None = None
        self._part = b""  # of an answer
        self._looked = False
        self._deadline = Deadline(self._loop, self._on_late)

    def ask(self, command: bytes, ends_at: float, done: Done) -> None:
        """`done` gets its answer, a string, or what went wrong: TimeoutError at loop time `ends_at`, OSError
        when the connection is lost, ResponseError for what Redis refuses, InvalidResponse for what is no
        string."""
        if self.closed or self._done is not None:
            self.close()
            done(ConnectionError("closed"))
            return
        self._done = done
        self._looked = False
        self._deadline.set(ends_at)
        self._transport.write(command)

    def close(self) -> None:
        """At once; who waits for an answer hears of it."""
        self.closed = True
        self._transport.abort()

    # --- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if self._done is None:
            self.close()  # nothing was asked: it would pass for the answer to the next command
            return
        if self._part:
            data = self._part + data
        self._part = b""
        try:
            answer = _read(data)
        except ResponseError as error:
            self._end(error)
        except ValueError:
            self.close()
            self._end(InvalidResponse("no answer of this script's"))
        else:
            if answer is None:
                self._part = data
            else:
                self._end(answer)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._deadline.cancel()
        self._end(ConnectionError("lost"))
        self._before.connection_lost(exc)  # the library may wait for it

    # ---

    def _end(self, outcome: bytes | Exception) -> None:
        done, self._done = self._done, None
        self._deadline.clear()
        if done is not None:
            done(outcome)

    def _on_late(self) -> None:
        if not self._looked:  # of a loop that was held up itself: the answer may lie in its socket
            self._looked = True
            self._deadline.set(self._loop.time() + LAST_LOOK_S)
        else:
            self.close()
            self._end(TimeoutError())


def take_over(writer: asyncio.StreamWriter) -> Wire:
    """`writer`: of a connection that is made, with nothing under way."""
    transport = cast(asyncio.Transport, writer.transport)
    wire = Wire(transport, transport.get_protocol())
    transport.set_protocol(wire)
    return wire


def packed(words: list[bytes]) -> bytes:
    """A command as Redis reads it (RESP)."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _read(data: bytes) -> bytes | None:
    """The string that `data` is the answer for; None while it isn't whole. ResponseError for an error,
    ValueError for anything else."""
    end = data.find(_END)
    if end < 0:
        if data[:1] not in (b"$", b"-") or len(data) > LONGEST_ANSWER:
            raise ValueError
        return None
    if data[:1] == b"-":
        if end + 2 != len(data):
            raise ValueError
        text = data[1:end].decode("utf-8", "replace")
        raise NoScriptError(text) if text.startswith("NOSCRIPT") else ResponseError(text)
    if data[:1] != b"$":
        raise ValueError
    size = int(data[1:end])
    start = end + 2
    if not 0 <= size <= LONGEST_ANSWER or len(data) > start + size + 2:
        raise ValueError
    if len(data) < start + size + 2:
        return None
    if data[start + size :] != _END:
        raise ValueError
    return data[start : start + size]
