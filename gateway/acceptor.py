"""Takes connections off a listening socket that several processes share, each its part.

Left to themselves, processes on one socket share badly: of 256 connections at once, one of four took 192. So
one that is ahead of the least busy waits a moment before it takes another, which the others then have; how
many each has is on its board. Sockets of their own (SO_REUSEPORT) would share evenly on average, but what
waits in the queue of a process that ends is reset, or waits for its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from gateway.board import Board, Peer

AHEAD = 1  # connections more than the least busy process that don't count
WAIT_SECONDS = 0.001  # the shortest that an event loop's timer knows
EXHAUSTED_SECONDS = 0.5
CLOSING_SECONDS = 1.0  # in which the queue is emptied, however fast more come
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class Acceptor:
    """`connections`: how many this process has; `board`, `peers`: its own, those of the other processes on
    the socket.

    Nobody waits for a process that is slow, paused or dead: who is ahead waits once, then takes the
    connection if it is still there.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        connections: Callable[[], int],
        board: Board,
        peers: Sequence[Peer],
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._connections = connections
        self._board = board
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[Any]] = set()
        self._exhausted = False

    def start(self) -> None:
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._ready)

    async def close(self) -> None:
        """Takes what waits at this moment, and then no more; what was taken is served.

        Whoever closes the socket last resets what waits in its queue, and that may be this process.
        """
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        until = self._loop.time() + CLOSING_SECONDS
        while (self._loop.time() < until and self._take()) or self._opening:
            if self._opening:
                await asyncio.wait(self._opening)

    def _ready(self) -> None:
        if self._is_ahead():
            self._pause(WAIT_SECONDS)
        else:
            self._accept()

    def _is_ahead(self) -> bool:
        mine = self._board.connections = self._connections() + len(self._opening)
        others = [count for peer in self._peers if (count := peer.connections) is not None]
        return bool(others) and mine > min(others) + AHEAD

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._timer = None
        if self._accept():
            self._loop.add_reader(self._listener, self._ready)

    def _accept(self) -> bool:
        """Takes one, if none was faster. False when it has to pause, since it can't have any."""
        self._take()
        if self._exhausted:
            self._pause(EXHAUSTED_SECONDS)
        return not self._exhausted

    def _take(self) -> bool:
        """Whether there was one, and it could be had."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError) as error:
            self._exhausted = False
            return not isinstance(error, BlockingIOError)
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            if not self._exhausted:  # it may last: say it once
                log.error("no connection can be taken: %s", error.strerror)
            self._exhausted = True
            return False
        self._exhausted = False
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        self._board.connections += 1
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has gone already
            with contextlib.suppress(OSError):
                connection.close()
