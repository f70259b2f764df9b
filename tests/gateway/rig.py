"""A real gateway on a free port, in front of fake workers, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from gateway.admission import open_limits
from gateway.app import Gateway
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.identity.authenticator import open_authenticator
from gateway.server import GatewayServer, listen, make_config
from gateway.settings import GatewaySettings, LimitSettings
from gateway.tracing import open_tracer
from tests.gateway.fake_worker import FakeWorker

CHAT = "/v1/chat/completions"


def target(worker: FakeWorker | str, slot: str = "s", generation: int = 1, **fields: Any) -> Target:
    """A ready target of the routes; the worker says that it is this one."""
    address = worker if isinstance(worker, str) else worker.address
    if isinstance(worker, FakeWorker):
        worker.identity = (slot, generation)
    return Target(slot=slot, generation=generation, address=address, **{"state": "ready", **fields})


class _Server(GatewayServer):
    """Leaves the test process's signals alone, and sees at once when it is to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.01)


class Rig:
    """`settings` of the gateway; model `m` with alias `nick` is configured, and `idle` that has no worker.
    `limit`: seconds that it may run, since pytest's own limit doesn't stop a test in this event loop."""

    limit = 100.0

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.path = folder / "routes.json"
        self.epoch = 0
        self.workers: list[FakeWorker] = []
        self.settings = GatewaySettings.model_validate({"usage": False, **settings})
        self.model_limits: dict[str, LimitSettings | None] = {}
        self.fleet_file: Path | None = None  # to be followed

    def route(self, *targets: Target, model: str = "m", **fields: Any) -> None:
        self.epoch += 1
        routes = Routes(model=model, epoch=self.epoch, aliases=("nick",), targets=targets, **fields)
        write_routes(self.path, RoutesFile(epoch=self.epoch, models={model: routes}))

    async def worker(self, name: str = "w", tcp: bool = False) -> FakeWorker:
        path = None if tcp else str(self.folder / f"{name}.sock")
        worker = await FakeWorker(name).start(path)
        self.workers.append(worker)
        return worker

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        auth = open_authenticator(self.settings.auth, self.folder)
        limits = open_limits(self.settings, self.model_limits, self.folder)
        models, tracer = {"m": ["nick"], "idle": []}, open_tracer(self.settings.tracing, "gateway.1")
        self.app = Gateway(self.settings, models, self.path, auth, limits, self.folder, tracer=tracer)
        if self.fleet_file is not None:
            self.app.follow(self.fleet_file)
        self.server = _Server(make_config(self.app, self.settings.timeouts.idle, 1), self.app.metrics)
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        await until(lambda: self.server.started)
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        base = f"http://127.0.0.1:{self.port}"
        try:
            async with (
                asyncio.timeout(self.limit),
                httpx.AsyncClient(
                    base_url=base, timeout=60, limits=pool, trust_env=False, verify=False
                ) as self.client,
            ):
                yield self
        finally:
            self.server.should_exit = True
            await serving
            self.app.close()
            for worker in self.workers:
                await worker.stop()

    async def unprobed(self) -> None:
        """No probes from now on; all targets count as well, also those that can't answer any."""
        await self.app.prober.aclose()
        for backend in self.app.router.table.backends.values():
            backend.health.probed(identified=True, up=True)

    async def post(self, body: Any = None, path: str = CHAT, **options: Any) -> httpx.Response:
        body = {"model": "m"} if body is None else body
        return await self.client.post(path, json=body, **options)

    async def ask(self, *, stream: bool = False, **fake: Any) -> httpx.Response:
        """A request for `m` that makes the worker do something."""
        return await self.post({"model": "m", "stream": stream, "fake": fake})

    async def raw(self, data: bytes, wait: float = 60.0) -> bytes:
        """Everything that comes back on a connection of its own until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            async with asyncio.timeout(wait):
                return await reader.read()
        finally:
            writer.close()

    def inflight(self) -> int:
        return sum(backend.inflight for backend in self.app.router.table.backends.values())

    async def idle(self) -> None:
        await until(lambda: self.inflight() == 0)


@contextlib.asynccontextmanager
async def one_worker(folder: Path, tcp: bool = False, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway with one ready worker of model `m`, as `rig.workers[0]`."""
    rig = Rig(folder, **settings)
    rig.route(target(await rig.worker(tcp=tcp)))
    async with rig.running():
        yield rig


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """What is waited for comes at once, unless the machine is busy with other things."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def http_post(body: bytes, extra: bytes = b"", path: str = CHAT) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        extra,
        len(body),
        body,
    )


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking that it has the four fields and nothing else."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error
