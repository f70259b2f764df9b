"""What the gateway itself wants to know of a worker: one GET on a connection of its own, bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.connection import UpstreamError
from gateway.upstream import Upstream

SECONDS = 2.0
MAX_ANSWER = 4 * 1024**2  # bytes


@dataclass(frozen=True)
class _Timeouts:
    connect: float = SECONDS
    first_byte: float = SECONDS
    idle: float = SECONDS
    total: float = SECONDS


async def ask_worker(upstream: Upstream, address: str, path: bytes) -> bytes | None:
    """The body of the answer to ``GET path``; None when there is none in time, or it isn't a good one."""
    try:
        async with asyncio.timeout(SECONDS):
            return await _fetch(upstream, address, path)
    except (UpstreamError, TimeoutError):
        return None


async def _fetch(upstream: Upstream, address: str, path: bytes) -> bytes | None:
    connection = await upstream.connect(address, SECONDS)
    try:
        ends_at = asyncio.get_running_loop().time() + SECONDS
        head = b"GET %b HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n" % path
        connection.start(head, b"", _Timeouts(), SECONDS, ends_at)
        await connection.head()
        body = bytearray()
        while piece := await connection.read():
            body += piece
            if len(body) > MAX_ANSWER:
                return None
        return bytes(body) if connection.status == 200 else None
    finally:
        connection.close()
