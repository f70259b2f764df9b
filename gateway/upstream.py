"""The gateway's kept-alive connections to workers, by address."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from urllib.parse import urlsplit

from gateway.connection import Connection, UpstreamError

IDLE_PER_TARGET = 512  # a burst above it closes what it opened
LISTENER_BUSY_PAUSE = 0.005
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_LOOK_UP_FILES = (
    4  # that the look-up of a name opens at most: a table of this machine, sockets to name servers
)

log = logging.getLogger(__name__)


def parse_address(address: str) -> str | tuple[str, int]:
    """A Unix socket's path from ``unix:/path``, host and port from ``http://host:port``; else ValueError."""
    if address.startswith("unix:/"):
        return address.removeprefix("unix:")
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path.strip("/"):
        raise ValueError(f"{address!r} is no address; unix:/path or http://host:port is needed")
    return parts.hostname, parts.port


class Upstream:
    """The kept-alive connections of one gateway, per worker address. No upper limit of those in use."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._exhausted = False

    @property
    def open_connections(self) -> int:
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, address: str) -> Connection | None:
        """The idle connection used last, if there is one."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.closed:
                connection.reused = True
                return connection
        return None

    async def connect(self, address: str, timeout: float) -> Connection:
        """A fresh connection; UpstreamError("connect") after `timeout` seconds or when refused, "exhausted"
        when this process can't have one."""
        try:
            async with asyncio.timeout(timeout):
                connection = await self._connect(address)
        except TimeoutError:
            raise UpstreamError("connect", f"no connection within {timeout:g} s", untouched=True) from None
        except OSError as error:
            if lack := _lack(error):
                if not self._exhausted:  # it may last: say it once
                    log.error("no connection to a worker can be made: %s", lack)
                self._exhausted = True
                raise UpstreamError("exhausted", f"no connection: {lack}", untouched=True) from None
            raise UpstreamError("connect", f"connection refused: {error}", untouched=True) from None
        self._exhausted = False
        if not connection.closed:
            self._open.add(connection)  # only now: one whose making is cancelled never hears of its own end
        return connection

    async def _connect(self, address: str) -> Connection:
        loop = asyncio.get_running_loop()

        def create() -> Connection:
            return Connection(address, self._forget)

        target = parse_address(address)
        if isinstance(target, tuple):  # both event loops set TCP_NODELAY themselves
            _, connection = await loop.create_connection(create, *target)
            return connection
        while True:
            try:
                _, connection = await loop.create_unix_connection(create, target)
                return connection
            except (
                BlockingIOError
            ):  # the listener's queue is full; only Unix sockets say so instead of waiting
                await asyncio.sleep(LISTENER_BUSY_PAUSE)

    def give_back(self, connection: Connection) -> None:
        """Call once for every connection taken or made, in `finally`."""
        idle = self._idle.setdefault(connection.address, [])
        if connection.finish() and len(idle) < IDLE_PER_TARGET:
            idle.append(connection)
        else:
            connection.close()

    def retain(self, addresses: set[str]) -> None:
        """Closes idle connections to all other addresses."""
        for address in self._idle.keys() - addresses:
            for connection in self._idle.pop(address):
                connection.close()

    def close(self) -> None:
        self._idle.clear()
        for connection in list(self._open):
            connection.close()

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)


def _lack(error: OSError) -> str:
    """What this process lacks, where that is why; else nothing."""
    if error.errno in _EXHAUSTED:
        return str(error.strerror)
    if not isinstance(error, socket.gaierror):
        return ""
    if error.errno == socket.EAI_MEMORY:
        return os.strerror(errno.ENOMEM)
    # A look-up that can't open what it needs mostly says that there is no such name: see what can be opened.
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(_LOOK_UP_FILES):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as lack:
            return str(lack.strerror) if lack.errno in _EXHAUSTED else ""
    return ""
