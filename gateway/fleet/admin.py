"""The supervisor's admin endpoint: HTTP on a Unix socket that only its owner can use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.fleet.admin_connections import AT_ONCE, BoundedProtocol
from gateway.fleet.rollout import Rollout, Version
from gateway.fleet.statedir import StateDir
from gateway.fleet.steps import Applying
from gateway.fleet.unit import UnitStatus


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /status` answers; `started` is a Unix time. `rollouts`: each model's that is under way, or
    its last one; `versions`: what models run that don't run what the fleet file says; `change`: of the fleet
    file, the one under way, or the last one."""

    supervisor: int
    state_dir: str
    url: str
    started: float
    stopping: bool
    epoch: int
    units: tuple[UnitStatus, ...]
    rollouts: tuple[Rollout, ...] = ()
    versions: dict[str, Version] = {}
    change: Applying | None = None


def admin_app(
    status: Callable[[], FleetStatus], stop: Callable[[bool], None], more: Sequence[Route] = ()
) -> Starlette:
    """GET /status; POST /stop (`?quick=1` doesn't wait for requests in flight); and `more` routes."""

    async def get_status(_: Request) -> Response:
        return _json(status())

    async def post_stop(request: Request) -> Response:
        stop(request.query_params.get("quick") == "1")
        return _json(status(), 202)

    return Starlette(
        routes=[Route("/status", get_status), Route("/stop", post_stop, methods=["POST"]), *more],
    )


@contextlib.asynccontextmanager
async def serve_admin(app: Starlette, state: StateDir, look: float) -> AsyncIterator[None]:
    """Serves `app` on the socket within the running loop; anew when somebody has taken the socket away, which
    is looked at every `look` seconds."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_served(app, state.admin_socket))
        keeping = asyncio.create_task(_keep(app, state, look, stack), name="admin socket")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _keep(app: Starlette, state: StateDir, look: float, stack: contextlib.AsyncExitStack) -> None:
    while True:
        await asyncio.sleep(look)
        path = state.admin_socket
        if state.is_ours() and not path.is_socket():
            with contextlib.suppress(OSError):  # its directory may not be back yet
                await stack.enter_async_context(_served(app, path))


@contextlib.asynccontextmanager
async def _served(app: Starlette, path: Path) -> AsyncIterator[None]:
    listener = _private_socket(path)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        backlog=AT_ONCE,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()


def _private_socket(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # 0600 from its first moment
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen()  # at once: who asks before it is served waits, in place of finding nobody
    return listener


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():  # as many may wait as the kernel allows: who finds no room is refused
            listener.listen(socket.SOMAXCONN)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield


def _json(body: FleetStatus, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
