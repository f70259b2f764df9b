from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.fake_worker import ndjson_line, sse_event
from tests.gateway.rig import CHAT, Rig, http_post, one_worker, target, until


def request(**fake: Any) -> dict[str, Any]:
    return {"model": "m", "stream": True, "fake": fake}


async def collect(rig: Rig, **fake: Any) -> tuple[httpx.Response, bytes]:
    async with rig.client.stream("POST", CHAT, json=request(**fake)) as response:
        return response, b"".join([piece async for piece in response.aiter_raw()])


async def test_stream_bytes_are_the_workers_bytes(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        response, body = await collect(rig, do="sse", chunks=2000)
        expected = b"".join(map(sse_event, range(2000))) + b"data: [DONE]\n\n"
        assert hashlib.sha256(body).digest() == hashlib.sha256(expected).digest()
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        response, body = await collect(rig, do="ndjson", chunks=500)
        assert body == b"".join(map(ndjson_line, range(500)))
        assert response.headers["x-accel-buffering"] == "no"
        assert "x-accel-buffering" not in (await rig.ask()).headers


async def test_chunks_are_not_held_back(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        async with rig.client.stream("POST", CHAT, json=request(do="sse", chunks=3, gate_at=1)) as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == sse_event(0)  # while the worker waits
            rig.workers[0].gate.set()
            rest = b"".join([piece async for piece in pieces])
        assert rest == sse_event(1) + sse_event(2) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("torn", [False, True])
async def test_a_worker_that_dies_in_a_stream(tmp_path: Path, torn: bool) -> None:
    async with one_worker(tmp_path) as rig:
        _, body = await collect(rig, do="sse", chunks=60, die_at=40, torn=torn, delay=0.001)
        whole = b"".join(map(sse_event, range(40)))
        assert body.startswith(whole)
        assert b"[DONE]" not in body
        last = body.removesuffix(b"\n\n").rsplit(b"\n\n", 1)[1]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "stream_interrupted"
        if not torn:
            assert body == whole + last + b"\n\n"
        assert len(rig.workers[0].requests) == 1
        assert rig.inflight() == 0


async def test_openai_sdk_raises_on_a_broken_stream(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="k", max_retries=0
        ) as sdk:
            stream = await sdk.chat.completions.create(
                model="m", messages=[], stream=True, extra_body={"fake": {"do": "sse", "die_at": 3}}
            )
            for _ in range(3):
                await anext(stream)
            with pytest.raises(openai.APIError, match="in the middle of this stream"):
                await anext(stream)


@pytest.mark.parametrize("torn", [False, True])
async def test_ndjson_ends_with_an_error_line(tmp_path: Path, torn: bool) -> None:
    async with one_worker(tmp_path) as rig:
        _, body = await collect(rig, do="ndjson", die_at=4, torn=torn)
        lines = body.splitlines()
        assert lines[:4] == [ndjson_line(number).strip() for number in range(4)]
        assert json.loads(lines[-1])["error"]["code"] == "stream_interrupted"
        assert len(lines) == 5 + torn


async def test_a_stream_that_stops_ends_with_a_timeout_event(tmp_path: Path) -> None:
    async with one_worker(tmp_path, timeouts={"idle": 0.3}) as rig:
        _, body = await collect(rig, do="sse", chunks=10, stop_at=5)
        assert body.count(b"token") == 5
        error = json.loads(body.rstrip().rsplit(b"data: ", 1)[1])["error"]
        assert error["code"] == "worker_timeout"
        assert "gateway.timeouts.idle" in error["message"]
        await until(lambda: rig.workers[0].requests[0].closed_at)


async def test_the_total_limit_ends_a_stream(tmp_path: Path) -> None:
    async with one_worker(tmp_path, timeouts={"total": 0.5}) as rig:
        _, body = await collect(rig, do="sse", chunks=10_000, delay=0.02)
        assert (
            "gateway.timeouts.total" in json.loads(body.rstrip().rsplit(b"data: ", 1)[1])["error"]["message"]
        )


async def test_a_broken_answer_of_known_length_looks_broken(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        with pytest.raises(httpx.RemoteProtocolError, match=r"incomplete|peer closed"):
            await rig.ask(do="short")
        answer = await rig.raw(http_post(b'{"model":"m","fake":{"do":"short"}}'))
        assert b"content-length: 100\r\n" in answer
        assert answer.endswith(b'\r\n\r\n{"only":')
        assert rig.inflight() == 0
        assert (await rig.post()).status_code == 200


async def test_300_slow_streams_to_one_worker(tmp_path: Path) -> None:
    async with one_worker(tmp_path, timeouts={"connect": 60}) as rig:
        body = json.dumps(request(do="sse", chunks=5, gate_at=2)).encode()
        post = http_post(body, b"connection: close\r\n")
        running = [asyncio.create_task(rig.raw(post, wait=240)) for _ in range(300)]
        await until(
            lambda: (
                len(rig.workers[0].requests) == rig.inflight() == 300 or any(map(asyncio.Task.done, running))
            ),
            120,
        )
        assert [task.result() for task in running if task.done()] == []  # what ended too early, and how
        assert rig.app.upstream.open_connections == 300
        assert (await rig.client.get("/health")).status_code == 200
        rig.workers[0].gate.set()
        for raw in await asyncio.gather(*running):
            assert [raw.count(b"token %d " % number) for number in range(6)] == [1, 1, 1, 1, 1, 0]
            assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert rig.inflight() == 0
        assert rig.app.upstream.open_connections == rig.app.upstream.idle_connections


async def test_a_long_stream_survives_changes_of_the_routes(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        other = await rig.worker("other")
        stream = asyncio.create_task(collect(rig, do="sse", chunks=40, gate_at=20))
        await until(lambda: rig.inflight() == 1)
        for generation in range(2, 6):
            rig.route(target(other, generation=generation))
            await until(lambda: rig.app.router.table.epoch == rig.epoch)
            assert (await rig.post()).json()["served_by"] == "other"
            assert rig.inflight() == 1
        rig.workers[0].gate.set()
        response, body = await stream
        assert body.endswith(b"[DONE]\n\n")
        assert body.count(b"token") == 40
        assert response.headers["x-pagefleet-target"] == "s.1"
        assert rig.inflight() == 0


async def test_a_client_that_does_not_read_makes_the_worker_wait(tmp_path: Path) -> None:
    size = 64 * 1024**2
    async with one_worker(tmp_path) as rig:
        with socket.create_connection(("127.0.0.1", rig.port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            body = json.dumps({"model": "m", "fake": {"do": "big", "size": size}}).encode()
            await loop.sock_sendall(client, http_post(body, b"connection: close\r\n"))
            await until(lambda: rig.workers[0].requests)
            await asyncio.sleep(0.5)
            assert not rig.workers[0].requests[0].answered
            received = 0
            while piece := await loop.sock_recv(client, 1 << 20):
                received += len(piece)
        assert size < received < size + 1000
