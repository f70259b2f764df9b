"""Real gateway processes that count together in a real Redis: exact at once, and through its faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from tests.conftest import ROOT
from tests.gateway.forked import ForkedGateway
from tests.gateway.redis_server import RedisServer, running, watched
from tests.gateway.rig import CHAT, Rig, http_post, target, until

pytestmark = pytest.mark.redis
FAULTS = {429, 500, 502, 504}  # none of which a Redis that is away may cause


class Gateways:
    """Gateway processes in front of one worker; `urls` in the order of their start."""

    def __init__(self, rig: Rig, config: dict[str, Any]) -> None:
        self.rig = rig
        self.children: list[ForkedGateway] = []
        self.clients: list[httpx.AsyncClient] = []
        self._file = rig.folder / "fleet.json"
        gateway = {"port": 0, **config}
        models = [{"name": "m", "source": "o/n", **gateway.pop("model", {})}]
        self._file.write_text(json.dumps({"gateway": gateway, "models": models}))

    async def start(self) -> httpx.AsyncClient:
        """One more; a client of its own."""
        log = self.rig.folder / f"gateway{len(self.children)}.log"
        options = ["--config", str(self._file), "--state-dir", str(self.rig.folder)]
        self.children.append(ForkedGateway(options, log))
        await until(lambda: log.exists() and b"serves on" in log.read_bytes())
        (port,) = re.findall(rb"serves on \('127.0.0.1', (\d+)\)", log.read_bytes())
        # It says its address just before it listens.
        limits = httpx.Limits(max_connections=400)
        transport = httpx.AsyncHTTPTransport(retries=8, limits=limits)
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port.decode()}", transport=transport, timeout=60
        )
        self.clients.append(client)
        while (
            await client.post(CHAT, json={"model": "m"}, headers={"x-user-id": "nobody"})
        ).status_code == 503:
            await asyncio.sleep(0.05)
        return client

    async def stop(self) -> None:
        for client in self.clients:
            await client.aclose()
        for child in self.children:
            child.terminate()
        for child in self.children:
            assert child.wait(60) in (0, -signal.SIGKILL)

    def log(self) -> str:
        return "".join(path.read_text() for path in self.rig.folder.glob("gateway*.log"))


@contextlib.asynccontextmanager
async def gateways(folder: Path, count: int, **config: Any) -> AsyncIterator[Gateways]:
    rig = Rig(folder)
    rig.route(target(await rig.worker()))
    fleet = Gateways(rig, config)
    try:
        async with asyncio.timeout(200):
            for _ in range(count):
                await fleet.start()
            yield fleet
    finally:
        await fleet.stop()
        for worker in rig.workers:
            await worker.stop()


def made(folder: Path, name: str = "fleet") -> Path:
    (folder / name).mkdir()
    return folder / name


async def ask(client: httpx.AsyncClient, user: str = "ann", **body: Any) -> httpx.Response:
    return await client.post(CHAT, json={"model": "m", **body}, headers={"x-user-id": user})


async def degraded(client: httpx.AsyncClient) -> bool:
    page = (await client.get("/metrics")).text
    return "pagefleet_gateway_limits_degraded 1.0" in page


async def becomes(expected: bool, *clients: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while any([await degraded(client) is not expected for client in clients]):
            await asyncio.sleep(0.05)


def limits(
    default: dict[str, Any], url: str, policy: str = "local", *, faults: bool = False
) -> dict[str, Any]:
    """Where Redis is well, decisions are its own, however busy the machine is."""
    given = {"default": default, "on_redis_error": policy, "redis_timeout": "1s" if faults else "20s"}
    return {"redis_url": url, "limits": given}


async def at_once(client: httpx.AsyncClient) -> bytes:
    """The head of an answer, over a connection of its own: a pool of hundreds takes a second for each."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(http_post(b'{"model":"m"}', b"x-user-id: ann\r\nconnection: close\r\n"))
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return head


async def test_three_processes_and_a_thousand_requests_at_once_let_exactly_the_limit_pass(
    tmp_path: Path,
) -> None:
    scarce = {"qps": 0.001, "burst": 10}  # nothing comes back within a test
    with running(tmp_path / "redis") as server:
        async with gateways(made(tmp_path), 3, **limits(scarce, server.url)) as fleet:
            before = len(fleet.rig.workers[0].requests)
            answers = await asyncio.gather(*(at_once(fleet.clients[i % 3]) for i in range(1000)))
            assert Counter(answer.split()[1] for answer in answers) == {b"200": 10, b"429": 990}
            assert len(fleet.rig.workers[0].requests) == before + 10
            assert all(b"\r\nx-ratelimit-limit-requests: 10\r\n" in answer for answer in answers)
            refused = [answer for answer in answers if answer.split()[1] == b"429"]
            assert all(re.search(rb"\r\nretry-after: [1-9]", answer) for answer in refused)


async def test_a_killed_gateways_slots_return_and_the_counts_are_sane(tmp_path: Path) -> None:
    """kill -9 under load: the slots of what it had in flight are free after the life of its leases."""
    key = "pagefleet:{u:ann}:user:ann:concurrency"
    bounds = {"concurrency": 20, "qps": 1000, "burst": 1000}
    with running(tmp_path / "redis") as server, server.client() as redis:
        async with gateways(made(tmp_path), 1, **limits(bounds, server.url)) as fleet:
            (living,) = redis.zrange("pagefleet:{gateways}", 0, -1)
            await fleet.start()
            hanging = [
                asyncio.create_task(ask(client, stream=True, fake={"do": "sse", "gate_at": 1}))
                for client in fleet.clients * 10
            ]
            await until(lambda: redis.zcard(key) == 20)
            assert (await ask(fleet.clients[0])).status_code == 429
            fleet.children[1].kill()
            fleet.children[1].wait()
            held = dict(redis.zrange(key, 0, -1, withscores=True))
            assert len(held) == 20
            assert max(held.values()) / 1e6 <= time.time() + 31
            left = [name for name in held if not name.startswith(living)]
            assert len(left) == 10
            redis.zadd(
                key, {name: (time.time() - 1) * 1e6 for name in left}
            )  # as if half a minute had passed
            hanging += [
                asyncio.create_task(ask(fleet.clients[0], stream=True, fake={"do": "sse", "gate_at": 1}))
                for _ in range(10)
            ]
            await until(lambda: len(set(redis.zrange(key, 0, -1)) - set(left)) == 20)
            assert (await ask(fleet.clients[0])).status_code == 429  # ten came back, and no more
            fleet.rig.workers[0].gate.set()
            done = await asyncio.gather(*hanging, return_exceptions=True)
            assert sum(isinstance(answer, httpx.Response) for answer in done) == 20
            await until(lambda: redis.zcard(key) == 0)
            third = await fleet.start()
            assert (await ask(third)).status_code == 200


@pytest.mark.parametrize("policy", ["local", "closed"])
async def test_redis_paused_killed_and_restarted_empty(tmp_path: Path, policy: str) -> None:
    """Under steady load within the limits: never a 429, and only `closed` ever refuses."""
    with running(tmp_path / "redis") as server:
        config = limits(
            {"qps": 100_000, "burst": 100_000, "concurrency": 1000}, server.url, policy, faults=True
        )
        async with gateways(made(tmp_path), 2, **config) as fleet:
            seen: list[Counter[int]] = [Counter()]
            slowest = 0.0
            stop = asyncio.Event()

            async def load(client: httpx.AsyncClient) -> None:
                nonlocal slowest
                while not stop.is_set():
                    began, phase = time.monotonic(), seen[-1]
                    phase[(await ask(client)).status_code] += 1
                    slowest = max(slowest, time.monotonic() - began)
                    await asyncio.sleep(0.005)

            loads = [asyncio.create_task(load(client)) for client in fleet.clients * 2]
            away, back = _faults(server)
            for fault, repair in zip(away, back, strict=True):
                await asyncio.sleep(0.3)
                fault()
                await becomes(True, *fleet.clients)
                seen.append(Counter())
                await until(lambda: seen[-1].total() > 20)
                expected = {503} if policy == "closed" else {200}
                assert set(seen[-1]) == expected, policy
                repair()
                await becomes(False, *fleet.clients)
                await asyncio.sleep(0.1)
                seen.append(Counter())
            await until(lambda: seen[-1].total() > 20)
            stop.set()
            await asyncio.gather(*loads)
            assert set(seen[-1]) == {200}
            assert not FAULTS & set(sum(seen, Counter()))
            assert slowest < 30
            with server.client() as client:  # what runs is known to the new one, and nothing else is left
                await until(lambda: client.zcard("pagefleet:{u:ann}:user:ann:concurrency") == 0)
        assert "Traceback" not in fleet.log()


def _faults(server: RedisServer) -> tuple[list[Any], list[Any]]:
    return [server.pause, server.kill], [server.resume, server.start]


async def test_a_failover_refuses_nobody(tmp_path: Path) -> None:
    """The master is killed under load; from the new one on, limits are counted together again."""
    with watched(tmp_path) as (url, (master, replica)):
        config = limits({"qps": 100_000, "burst": 100_000, "concurrency": 50}, url, faults=True)
        async with gateways(made(tmp_path), 2, **config) as fleet:
            held = [
                asyncio.create_task(ask(client, stream=True, fake={"do": "sse", "gate_at": 1}))
                for client in fleet.clients
            ]
            await until(lambda: len(fleet.rig.workers[0].requests) == 4)
            master.kill()
            statuses: Counter[int] = Counter()
            async with asyncio.timeout(90):
                while not statuses or any([await degraded(client) for client in fleet.clients]):
                    statuses.update([(await ask(client)).status_code for client in fleet.clients])
            assert set(statuses) == {200}
            with replica.client() as redis:
                assert redis.role()[0] == b"master"
                await until(lambda: redis.zcard("pagefleet:{u:ann}:user:ann:concurrency") == 2)
                fleet.rig.workers[0].gate.set()
                await asyncio.gather(*held)
                await until(lambda: redis.zcard("pagefleet:{u:ann}:user:ann:concurrency") == 0)


async def test_gateways_start_without_redis_and_find_it_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    config = limits({"qps": 0.01, "burst": 4}, server.url)
    async with gateways(made(tmp_path), 1, **config) as fleet:
        (client,) = fleet.clients
        assert await degraded(client)
        statuses = [(await ask(client)).status_code for _ in range(5)]
        assert statuses == [200] * 4 + [429]  # its own limit, which is genuine
        server.start()
        try:
            await becomes(False, client)
            assert [(await ask(client)).status_code for _ in range(5)] == [200] * 4 + [429]
        finally:
            server.kill()


async def test_a_redis_user_with_the_rights_that_the_page_names(tmp_path: Path) -> None:
    """Among them is no SCRIPT."""
    (rights,) = re.findall(r"`ACL SETUSER ([^`]*)`", (ROOT / "docs" / "operations.md").read_text())
    with running(tmp_path / "redis") as server, server.client() as redis:
        redis.execute_command("ACL", "SETUSER", *rights.replace("PASSWORD", "secret").split())
        url = f"unix://{rights.split()[0]}:secret@{server.socket}"
        async with gateways(made(tmp_path), 1, **limits({"qps": 0.01, "burst": 3}, url)) as fleet:
            (client,) = fleet.clients
            assert [(await ask(client)).status_code for _ in range(5)] == [200] * 3 + [429] * 2
            assert not await degraded(client)
            command(tmp_path / "fleet", "set", "user", "ann", "--qps", "none")
            await until(lambda: redis.hlen("pagefleet:{limits}:set") == 1)
            assert (await ask(client)).status_code == 200
        assert "secret" not in fleet.log()


async def test_limits_set_by_the_command_line_hold_on_every_gateway(tmp_path: Path) -> None:
    """Also on those of another machine, whose state directory is another one."""
    with running(tmp_path / "redis") as server:
        config = limits({"qps": 1000, "burst": 1000}, server.url)
        async with (
            gateways(made(tmp_path, "here"), 2, **config) as here,
            gateways(made(tmp_path, "there"), 1, **config) as there,
        ):
            clients = [*here.clients, *there.clients]
            command(tmp_path / "here", "set", "user", "ann", "--qps", "0.01", "--burst", "2")

            async def holds(count: int, name: str) -> None:
                async with asyncio.timeout(60):
                    for client in clients:
                        while (await ask(client, name)).headers["x-ratelimit-limit-requests"] != str(count):
                            await asyncio.sleep(0.05)

            await holds(2, "ann")
            await holds(1000, "bob")
            # What a gateway let pass by the limit before may have been forgotten with it: now they agree.
            for _ in range(2):
                await ask(clients[0])
            assert [(await ask(client)).status_code for client in clients] == [429] * 3
            command(tmp_path / "there", "unset", "user", "ann")
            await holds(1000, "ann")
            assert [(await ask(client)).status_code for client in clients] == [200] * 3


def command(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(pagefleet, ["limits", *arguments, "--state-dir", str(folder)])
    assert result.exit_code == 0, result.output
    return result.stdout
