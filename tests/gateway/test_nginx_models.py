"""nginx in front of workers, a path for each model: weights, what it hides, reloads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.fleet.nginx import render
from gateway.fleet.state import Routes, RoutesFile, Target
from tests.gateway.nginx_fleet import SECRET, fleet_of, raw_get
from tests.gateway.nginx_server import Nginx, standalone
from tests.gateway.rig import until


class Upstream(asyncio.Protocol):
    """Answers each request with its name; keeps the heads it saw."""

    def __init__(self, name: bytes, heads: list[bytes]) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(name), name)
        self.heads = heads
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        *heads, self.data = (self.data + data).split(b"\r\n\r\n")
        self.heads += heads
        self.transport.write(self.answer * len(heads))


@contextlib.asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[tuple[list[Target], list[bytes]]]:
    loop, heads, servers, found = asyncio.get_running_loop(), [], [], []
    for name in ("primary", "standby"):
        path = f"{folder}/{name}.sock"
        servers.append(await loop.create_unix_server(lambda name=name: Upstream(name.encode(), heads), path))
        found.append(Target(slot=name, generation=1, address=f"unix:{path}", state="ready"))
    yield found, heads
    for server in servers:
        server.close()


def split(targets: list[Target], *weights: int) -> RoutesFile:
    import msgspec

    made = tuple(msgspec.structs.replace(t, weight_bp=w) for t, w in zip(targets, weights, strict=True))
    return RoutesFile(epoch=1, models={"org/m": Routes(model="org/m", epoch=1, targets=made)})


async def ask(port: int, count: int, path: bytes) -> Counter[str]:
    """`count` requests on one connection, 50 at a time; who answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers: Counter[str] = Counter()
    request = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path
    for _ in range(count // 50):
        writer.write(request * 50)
        for _ in range(50):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 200"), head
            answers[(await reader.readexactly(7)).decode()] += 1
    writer.close()
    return answers


@pytest.mark.nginx
async def test_weights_are_honoured(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (workers, heads):
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path, "org/m")
        options = standalone(listen=nginx.listen, per_model="path")
        path = b"/models/org-m/v1/models"
        for weights in ((9_300, 700), (10_000, 0)):
            nginx.write(
                render(fleet, options, split(workers, *weights)).replace(
                    "worker_processes auto", "worker_processes 2"
                )
            )
            async with nginx.running():
                parts = await asyncio.gather(*(ask(nginx.port, 1_000, path) for _ in range(10)))
            shares = sum(parts, Counter())
            assert shares.total() == 10_000
            assert abs(shares["standby"] - weights[1]) <= 100, shares
    assert {head.split(b" ")[1] for head in heads} == {b"/v1/models"}


@pytest.mark.nginx
async def test_only_what_is_listed_reaches_a_worker(tmp_path: Path) -> None:
    """No administration, and none of the headers that workers believe from this machine."""
    async with two_workers(tmp_path) as (workers, heads):
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path, "org/m", "other")
        options = standalone(listen=nginx.listen, per_model="path")
        nginx.write(render(fleet, options, split(workers, 10_000, 0)))
        base = f"http://127.0.0.1:{nginx.port}/models/"
        headers = {"authorization": SECRET, "x-pagefleet-priority": "high", "x-pagefleet-usage": "u",
                   "x-forwarded-for": "::1", "cookie": SECRET, "accept": "text/event-stream"}  # fmt: skip
        async with nginx.running(), httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
            assert (await client.get("org-m/v1/models/a%2fb", headers=headers)).text == "primary"
            for path in (
                "admin/drain",
                "v1/../admin/drain",
                "v1/%2e%2e/metrics",
                "internal/whoami",
                "v1",
                "",
            ):
                answer = await raw_get(nginx.port, f"/models/org-m/{path}")
                assert answer.startswith(b"HTTP/1.1 404"), path
            none = await client.post("other/v1/chat/completions", json={})
            assert none.status_code == 503
            assert none.json()["error"]["code"] == "model_unavailable"
            assert none.headers["retry-after"] == "5"
        (head,) = heads
        assert b"text/event-stream" in head
        assert SECRET.encode() not in head
        assert b"pagefleet" not in head.lower().replace(b"host: pagefleet_model_0", b"")
        assert b"forwarded" not in head.lower()


@pytest.mark.nginx
async def test_a_reload_loses_no_request(tmp_path: Path) -> None:
    """Weights move to the standby in five reloads under load. A connection that nginx ended while idle is
    opened again, as every HTTP client does for requests that may be repeated; no answer is an error."""
    async with two_workers(tmp_path) as (workers, _):
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path, "org/m")
        options = standalone(listen=nginx.listen, per_model="path")
        nginx.write(render(fleet, options, split(workers, 10_000, 0)))
        answers: Counter[str] = Counter()
        done = asyncio.Event()
        moved = False

        async def load() -> None:
            transport = httpx.AsyncHTTPTransport(retries=0)
            base = f"http://127.0.0.1:{nginx.port}/models/org-m"
            async with httpx.AsyncClient(base_url=base, timeout=60, transport=transport) as client:
                while not done.is_set():
                    asked = moved
                    try:
                        answer = await client.get("/v1/models")
                    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                        answer = await client.get("/v1/models")
                        answers["repeated"] += 1
                    assert answer.status_code == 200
                    answers[answer.text] += asked

        async with nginx.running():
            tasks = [asyncio.create_task(load()) for _ in range(4)]
            for weight in (2_000, 4_000, 6_000, 8_000, 10_000):
                await asyncio.sleep(0.2)
                nginx.write(render(fleet, options, split(workers, 10_000 - weight, weight)))
                await nginx.reload()
            moved = True
            await until(lambda: answers["standby"] > 50)
            done.set()
            await asyncio.gather(*tasks)
    assert answers["primary"] == 0
    assert answers["repeated"] <= 4 * 5
