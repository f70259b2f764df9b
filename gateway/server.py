"""The gateway process: uvicorn on a socket of its own or the supervisor's, limits for clients, the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from contracts.notify import Notifier
from gateway.acceptor import Acceptor
from gateway.admission import open_limits
from gateway.app import Gateway
from gateway.board import Board, Peer
from gateway.client_protocol import ClientProtocol
from gateway.config import FleetFile
from gateway.fleet.commands import gateway_slots
from gateway.fleet.statedir import StateDir
from gateway.identity.authenticator import open_authenticator
from gateway.metrics import Metrics
from gateway.tracing import open_tracer

KEEP_ALIVE_SECONDS = 75  # over nginx's 60, so that nginx is the one who closes
BEAT_SECONDS = 0.2
REPORT_SECONDS = 5.0

log = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """uvicorn's server that exits 0 after a graceful SIGTERM, and quickly once its supervisor is gone.

    Processes that share the socket (the peers of `metrics`) share the connections evenly.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        metrics: Metrics,
        parent_pid: int | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        super().__init__(config)
        self._notifier = notifier or Notifier()
        self._metrics = metrics
        self._parent_pid = parent_pid
        self._acceptors: list[Acceptor] = []
        self._beating: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        log.info("%s: no new requests, finishing those in flight", signal.Signals(number).name)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        peers = self._metrics.peers
        await super().startup(sockets=[] if peers else sockets)
        self._acceptors = [self._acceptor(listener, peers) for listener in sockets or ()]
        for acceptor in self._acceptors if peers else ():
            acceptor.start()
        self._metrics.publish()  # before the first request: who can claim is known to live
        self._beating = asyncio.create_task(self._beat(), name="board")
        if self._notifier.is_used:
            self._reporting = asyncio.create_task(self._report(), name="systemd")

    def _acceptor(self, listener: socket.socket, peers: Sequence[Peer]) -> Acceptor:
        protocol = partial(
            cast(Any, self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        connections = self.server_state.connections
        return Acceptor(listener, protocol, lambda: len(connections), self._metrics.board, peers)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._metrics.board.leave()
        self._notifier.stopping("finishing the requests in flight")
        for acceptor in self._acceptors:
            await acceptor.close()
        try:
            await super().shutdown(sockets)
        finally:
            for task in filter(None, (self._beating, self._reporting)):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self._metrics.board.close()

    async def _beat(self) -> None:
        """Also while it drains: whoever drains lives."""
        while True:
            self._metrics.board.connections = len(self.server_state.connections)
            for peer in self._metrics.peers:
                peer.look()
            self._metrics.publish()
            await asyncio.sleep(BEAT_SECONDS)

    async def _report(self) -> None:
        """To systemd: ready, then signs of life as long as this loop turns."""
        while not self._notifier.ready("serving"):
            await asyncio.sleep(BEAT_SECONDS)
        while True:
            self._notifier.status(f"{len(self.server_state.connections)} connections")
            self._notifier.alive()
            await asyncio.sleep(self._notifier.watchdog or REPORT_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        if self._parent_pid is not None and os.getppid() != self._parent_pid:
            log.warning("the supervisor (pid %d) is gone", self._parent_pid)
            self._parent_pid = None
            self.config.timeout_graceful_shutdown = 1
            self.should_exit = True
        return await super().on_tick(counter)


def make_config(app: Gateway, silence: float, drain_seconds: float, loop: str = "uvloop") -> uvicorn.Config:
    """uvicorn as the gateway uses it. Its own log lines are dropped: the gateway logs what happens itself."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        app,
        loop=loop,
        http=cast(Any, partial(ClientProtocol, silence=silence)),
        ws="none",
        lifespan="on",
        interface="asgi3",  # else it asks whether the application is a coroutine function
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=4096,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket; OSError says what is wrong with the address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def limit_silence(listener: socket.socket, seconds: float) -> None:
    """Accepted connections inherit it: the kernel gives up a client that takes no bytes for so long."""
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def raise_open_files() -> None:
    """Two sockets per request: take all that the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(
    fleet: FleetFile,
    state_dir: Path,
    routes_path: Path,
    listener: socket.socket,
    parent_pid: int | None = None,
    loop: str = "uvloop",
    slot: str | None = None,
    generation: int = 0,
    fleet_file: Path | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or the end of `parent_pid`, then finishes what is in flight.

    `state_dir` holds keys, usage, and limits that were set while running; `slot`: which of a fleet's gateway
    processes this is, None: one by itself; `fleet_file`: followed while it serves. StoreUnusable when keys
    are needed and can't be read.
    """
    settings = fleet.gateway
    raise_open_files()
    limit_silence(listener, settings.timeouts.idle)
    auth = open_authenticator(settings.auth, state_dir)
    board, peers = Board(), []
    if slot is not None:
        state = StateDir(state_dir)
        board = Board(state.board(slot), generation)
        peers = [Peer(state.board(other)) for other in gateway_slots(settings.processes) if other != slot]
    models = {entry.name: entry.aliases for entry in fleet.models}
    limits = open_limits(settings, {entry.name: entry.limits for entry in fleet.models}, state_dir)
    tracer = open_tracer(settings.tracing, f"{slot or 'gateway'}.{generation}")
    app = Gateway(settings, models, routes_path, auth, limits, state_dir, board, peers, tracer)
    if fleet_file is not None:
        app.follow(fleet_file)
    config = make_config(app, settings.timeouts.idle, fleet.supervisor.drain_timeout, loop)
    server = GatewayServer(config, app.metrics, parent_pid, Notifier.from_environment())
    log.info("gateway (pid %d) serves on %s", os.getpid(), listener.getsockname())
    gc.collect()
    gc.freeze()  # modules and settings stay: no collection walks them, which would hold up every request
    try:
        server.run(sockets=[listener])
    finally:
        app.close()
    log.info("gateway (pid %d) ended", os.getpid())
