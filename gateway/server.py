"""The gateway process: uvicorn on a socket of its own or the supervisor's, limits for clients, the end."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contracts.errors import ApiError, bad_request
from gateway.app import Gateway
from gateway.config import FleetFile

MAX_HEAD = 64 * 1024  # bytes of request line and headers
HEAD_SECONDS = 30.0  # in which a request's head must arrive
KEEP_ALIVE_SECONDS = 75  # over nginx's 60, so that nginx is the one who closes
PIPELINE_LIMIT = 8
PARENT_CHECK_SECONDS = 0.5
ORPHAN_GRACE_SECONDS = 1.0

log = logging.getLogger(__name__)


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol with what an open port needs.

    JSON errors, a bounded head that must arrive in time, and a disconnect that is seen also when more
    requests were pipelined behind the running one.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._running: RequestResponseCycle | None = None
        self._head_open = True
        self._head_size = 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._unset_keepalive_if_required()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_open:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self.send_400_response("")
        waiting = self._running is None or self._running.response_complete
        if waiting and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = True
        self._head_size = 0

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._head_arrived()
        self._head_size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if self._head_size > MAX_HEAD:
            raise ValueError("head too large")
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) < PIPELINE_LIMIT:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._running is None or self._running.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._running is not None and not self._running.response_complete:
            self.transport.close()  # another answer is on its way; this one can't be put into it
            return
        reason, error = b"Bad Request", bad_request("This is no valid HTTP/1.1 request.", code="invalid_http")
        if self._head_size > MAX_HEAD:
            message = f"Request line and headers are over the limit of {MAX_HEAD} bytes."
            error = ApiError(431, message, code="headers_too_large")
            reason = b"Request Header Fields Too Large"
        body = msgspec.json.encode(error.body())
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (error.status, reason, len(body), body)
        )
        self.transport.close()


class GatewayServer(uvicorn.Server):
    """uvicorn's server that exits 0 after a graceful SIGTERM, and quickly once its supervisor is gone."""

    def __init__(self, config: uvicorn.Config, parent_pid: int | None = None) -> None:
        super().__init__(config)
        self._parent_pid = parent_pid

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

    async def on_tick(self, counter: int) -> bool:
        if self._parent_pid is not None and os.getppid() != self._parent_pid:
            log.warning("the supervisor (pid %d) is gone", self._parent_pid)
            self._parent_pid = None
            self.config.timeout_graceful_shutdown = 1
            self.should_exit = True
        return await super().on_tick(counter)


def make_config(app: Gateway, drain_seconds: float, loop: str = "uvloop") -> uvicorn.Config:
    """uvicorn as the gateway uses it. Its own log lines are dropped: the gateway logs what happens itself."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        app,
        loop=loop,
        http=ClientProtocol,
        ws="none",
        lifespan="on",
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
    routes_path: Path,
    listener: socket.socket,
    parent_pid: int | None = None,
    loop: str = "uvloop",
) -> None:
    """Serves until SIGTERM, SIGINT or the end of `parent_pid`, then finishes what is in flight."""
    settings = fleet.gateway
    raise_open_files()
    limit_silence(listener, settings.timeouts.idle)
    app = Gateway(settings, {entry.name: entry.aliases for entry in fleet.models}, routes_path)
    server = GatewayServer(make_config(app, fleet.supervisor.drain_timeout, loop), parent_pid)
    log.info("gateway (pid %d) serves on %s", os.getpid(), listener.getsockname())
    server.run(sockets=[listener])
    log.info("gateway (pid %d) ended", os.getpid())
