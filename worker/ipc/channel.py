"""Framed msgpack over a Unix socket pair.

A frame is a 4-byte little-endian length and that many bytes. A socket pair rather than a named endpoint: when
either process ends, however it ends, the other reads end-of-file at once, and nothing is left in the file
system.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30
_READ_SIZE = 1 << 18

T = TypeVar("T")


class ChannelClosed(Exception):
    """The other process has gone."""


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > MAX_FRAME:
                raise ChannelClosed(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            if len(buffer) - start - 4 < size:
                break
            frames.append(bytes(buffer[start + 4 : start + 4 + size]))
            start += 4 + size
        if start:
            del buffer[:start]
        return frames


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class EngineChannel(Generic[T]):
    """The engine's end: never blocks a step, neither to read nor because the server is slow to read."""

    def __init__(self, sock: socket.socket, incoming: type[T]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox: deque[memoryview] = deque()

    def send(self, message: Any) -> None:
        """Queue one message and write as much as the socket takes now."""
        self._outbox.append(memoryview(frame(self._encoder.encode(message))))
        self._flush()

    def receive(self, timeout: float | None = 0) -> list[T]:
        """Messages that have arrived; waits up to `timeout` seconds (None: for ever) for the first.

        Returns early with an empty list when only queued output was written. Raises ChannelClosed at
        end-of-file.
        """
        writers = [self._socket] if self._outbox else []
        readable, writable, _ = select.select([self._socket], writers, [], timeout)
        if writable:
            self._flush()
        if not readable:
            return []
        frames: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(_READ_SIZE)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the server process has gone")
            frames += self._frames.feed(data)
            if len(data) < _READ_SIZE:
                break
        return [self._decoder.decode(item) for item in frames]

    def drain(self, timeout: float) -> None:
        """Write what is queued, for at most `timeout` seconds: the last words before the process ends."""
        while self._outbox and select.select([], [self._socket], [], timeout)[1]:
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            head = self._outbox[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise ChannelClosed(str(error)) from error
            if sent < len(head):
                self._outbox[0] = head[sent:]
                return
            self._outbox.popleft()


class ServerChannel(Generic[T]):
    """The server's end, on asyncio streams: `send` never waits, `receive` yields decoded messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, incoming: Any) -> ServerChannel[T]:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, incoming)

    def send(self, message: Any) -> None:
        self._writer.write(frame(self._encoder.encode(message)))

    async def receive(self) -> list[T]:
        """The messages of the next read, in order. Raises ChannelClosed at end-of-file."""
        while True:
            try:
                data = await self._reader.read(_READ_SIZE)
            except ConnectionError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the engine process has gone")
            frames = self._frames.feed(data)
            if frames:
                return [self._decoder.decode(item) for item in frames]

    def close(self) -> None:
        self._writer.close()
