"""Client gone → the worker sees it at once, on every route, at every point; nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gateway import client_protocol
from gateway.routes import native, openai
from tests.gateway.rig import CHAT, Rig, http_post, one_worker, until

PROXIED = (*openai.PROXIED, *native.PROXIED)


AT_ONCE = 10.0  # seconds: less than anything else that would end a request here, much for a busy machine


async def send(
    rig: Rig, path: str = CHAT, fill: bytes = b"", **fake: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(http_post(json.dumps({"model": "m", "fake": fake}).encode() + fill, path=path))
    return reader, writer


async def leave(rig: Rig, writer: asyncio.StreamWriter, request: int = -1) -> float:
    """Closes the client's connection; seconds until the worker saw it."""
    left_at = asyncio.get_running_loop().time()
    writer.close()
    await until(lambda: rig.workers[0].requests[request].closed_at)
    return (rig.workers[0].requests[request].closed_at or 0) - left_at


@pytest.mark.parametrize("tcp", [False, True])
async def test_before_the_first_byte_on_every_route(tmp_path: Path, tcp: bool) -> None:
    async with one_worker(tmp_path, tcp) as rig:
        for number, path in enumerate(PROXIED, start=1):
            _, writer = await send(rig, path, do="json", wait=30)
            await until(lambda count=number: len(rig.workers[0].requests) == count)
            await asyncio.sleep(0.05)
            assert await leave(rig, writer) < AT_ONCE
        await rig.idle()


async def test_after_a_second_of_waiting(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        _, writer = await send(rig, do="json", wait=30)
        await asyncio.sleep(1)
        assert await leave(rig, writer) < AT_ONCE
        metrics = (await rig.client.get("/metrics")).text
        assert 'pagefleet_gateway_requests_total{model="m",status="499",target="s.1"} 1.0' in metrics


async def test_at_once(tmp_path: Path) -> None:
    """The client has left before the gateway begins to look for that."""
    async with one_worker(tmp_path) as rig:
        _, writer = await send(rig, do="hang")
        await until(lambda: rig.workers[0].requests)
        assert await leave(rig, writer) < AT_ONCE


async def test_in_a_stream(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for fake in ({"do": "sse", "chunks": 10_000, "delay": 0.01}, {"do": "sse", "stop_at": 2}):
            reader, writer = await send(rig, **fake)
            await reader.readuntil(b"token")
            assert await leave(rig, writer) < AT_ONCE
        await rig.idle()


@pytest.mark.parametrize("more", [3, 100])
async def test_with_more_requests_pipelined_behind(tmp_path: Path, more: int) -> None:
    """Also more than are read before the first is answered."""
    async with one_worker(tmp_path) as rig:
        _, writer = await send(rig, do="hang")
        await until(lambda: rig.workers[0].requests)
        await asyncio.sleep(0.1)
        writer.write(http_post(b'{"model":"m"}') * more)
        await asyncio.sleep(0.1)
        assert await leave(rig, writer) < AT_ONCE
        await rig.idle()
        assert len(rig.workers[0].requests) == 1


MORE_THAN_A_WINDOW = {
    "requests": http_post(b'{"model":"m"}') * 40_000,
    "body": http_post(b'{"model":"m"}' + b" " * (5 << 20)),
}


@pytest.mark.parametrize("behind", MORE_THAN_A_WINDOW.values(), ids=MORE_THAN_A_WINDOW.keys())
async def test_with_more_behind_than_its_connection_holds(tmp_path: Path, behind: bytes) -> None:
    """A client's end can't even arrive before what it sent is read."""
    async with one_worker(tmp_path) as rig:
        _, writer = await send(rig, do="hang")
        await until(lambda: rig.workers[0].requests)
        writer.write(behind)
        writer.transport.abort()  # as the kernel does for a process that is killed: close() would first send
        client = writer.get_extra_info("socket")
        await until(lambda: client.fileno() == -1)
        await until(lambda: rig.workers[0].requests[0].closed_at, AT_ONCE)
        await rig.idle()
        assert len(rig.workers[0].requests) == 1


async def test_who_stays_is_told_that_it_sent_too_much_behind(tmp_path: Path) -> None:
    """What was taken is answered, the rest is refused, once."""
    async with one_worker(tmp_path) as rig:
        worker = rig.workers[0]
        reader, writer = await send(rig, do="sse", chunks=3, gate_at=1)
        await until(lambda: worker.requests)
        writer.write(MORE_THAN_A_WINDOW["requests"])
        (connection,) = rig.server.server_state.connections
        await until(lambda: connection._refusal)  # type: ignore[union-attr]
        worker.gate.set()
        async with asyncio.timeout(60):
            raw = await reader.read()
        *answers, last = re.split(rb"HTTP/1\.1 (?=\d)", raw)[1:]
        assert [one[:3] for one in answers] == len(worker.requests) * [b"200"]
        assert b"[DONE]" in answers[0]
        assert 8 < len(answers) < 40_000
        assert last.startswith(b"400 ")
        assert b'"pipelined_too_much"' in last
        writer.close()


async def test_what_comes_behind_a_request_without_end_ends_it(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        _, writer = await send(rig, do="hang")
        await until(lambda: rig.workers[0].requests)
        writer.write(http_post(b" " * (client_protocol.MOST_UNREAD << 1)))
        await until(lambda: rig.workers[0].requests[0].closed_at)
        await rig.idle()
        writer.transport.abort()


async def test_while_the_connection_is_made(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        begun = asyncio.Event()
        ended = asyncio.Event()

        async def slow(address: str, timeout: float) -> Any:
            begun.set()
            try:
                await asyncio.sleep(30)
            finally:
                ended.set()

        rig.app.upstream.connect = slow  # type: ignore[method-assign]
        _, writer = await send(rig)
        await begun.wait()
        writer.close()
        async with asyncio.timeout(60):
            await ended.wait()
        await rig.idle()


async def test_in_the_middle_of_its_body(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(http_post(b'{"model":"m"}')[:-5])
        await until(lambda: rig.server.server_state.tasks)
        writer.close()
        await until(lambda: not rig.server.server_state.tasks)
        assert not rig.workers[0].requests


FILL = 8 << 10  # bytes of each body, so that kept ones show


async def abort_streams(rig: Rig, count: int) -> None:
    async def one() -> None:
        reader, writer = await send(rig, fill=b" " * FILL, do="sse", chunks=1000, delay=0.05)
        await reader.readuntil(b"token")
        writer.close()

    for _ in range(count // 50):
        await asyncio.gather(*(one() for _ in range(50)))
    await rig.idle()


async def test_1200_aborted_streams_leave_nothing_behind(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        await abort_streams(rig, 200)
        rig.workers[0].requests.clear()
        await asyncio.sleep(0.1)
        tasks = len(asyncio.all_tasks())
        gc.collect()
        before = len(gc.get_objects())
        tracemalloc.start()
        await abort_streams(rig, 1200)
        rig.workers[0].requests.clear()
        await until(lambda: not rig.server.server_state.connections and not rig.app.upstream.open_connections)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        gc.collect()
        grown = len(gc.get_objects()) - before
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert rig.inflight() == 0
        assert not rig.server.server_state.tasks
        assert not rig.workers[0].connections
        assert grown < 1000, f"{grown} objects more after 1200 aborts"
        assert kept < 1 << 20, f"{kept} bytes more after 1200 aborts"
        assert (await rig.post()).status_code == 200
