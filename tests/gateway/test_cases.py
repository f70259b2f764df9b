"""Cases from the field that go through several parts: what passes is neither held back nor changed, and a
fleet that was killed is followed by one whole fleet."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from gateway.fleet.nginx import render
from gateway.fleet.reaper import MARK, marked
from tests.gateway.nginx_fleet import fleet_of
from tests.gateway.nginx_server import Nginx, standalone
from tests.gateway.rig import CHAT, Rig, target
from tests.gateway.supervised import PATIENCE, fleet_file, start

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = {"model": "m", "stream": True, "messages": []}


class Pieces:
    """A worker that answers each POST with these pieces, a turn for each."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.turns = asyncio.Semaphore(len(pieces))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")
                    continue
                writer.write(HEAD)
                for piece in self.pieces:
                    await self.turns.acquire()
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        writer.close()


@contextlib.asynccontextmanager
async def gateway_before(worker: Pieces, folder: Path) -> AsyncIterator[Rig]:
    socket = folder / "pieces.sock"
    server = await asyncio.start_unix_server(worker.serve, socket)
    rig = Rig(folder)
    rig.route(target(f"unix:{socket}"))
    try:
        async with rig.running():
            await rig.unprobed()
            yield rig
    finally:
        server.close()


# --- nothing is held back


async def one_by_one(worker: Pieces, client: httpx.AsyncClient) -> None:
    """The worker sends a piece when the one before it has arrived: held back for good is held back at all."""
    for _ in worker.pieces:
        await worker.turns.acquire()
    async with client.stream("POST", CHAT, json=BODY) as answer:
        arriving = answer.aiter_raw()
        for piece in worker.pieces:
            worker.turns.release()
            received = b""
            while len(received) < len(piece):
                received += await anext(arriving)
            assert received == piece
        assert [left async for left in arriving] == []
    for _ in worker.pieces:
        worker.turns.release()


@pytest.mark.nginx
async def test_each_token_arrives_before_the_next_is_made(tmp_path: Path) -> None:
    """Through a gateway, and through nginx and a gateway; however small or large a piece is."""
    sizes = [1, 2, 30, 200, 4095, 4096, 4097, 16 << 10, 70_000, 3]
    worker = Pieces([b"data: " + b"x" * size + b"\n\n" for size in sizes * 5])
    async with gateway_before(worker, tmp_path) as rig:
        await one_by_one(worker, rig.client)
        nginx = Nginx(tmp_path)
        upstream = (f"127.0.0.1:{rig.port}",)
        nginx.write(render(fleet_of(tmp_path), standalone(listen=nginx.listen, upstreams=upstream)))
        base = f"http://127.0.0.1:{nginx.port}"
        async with nginx.running(), httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
            await one_by_one(worker, client)


# --- nothing is changed


def tool_call_stream() -> bytes:
    """Two calls whose arguments come in small parts, between comments and line ends of every kind."""
    arguments = [json.dumps({"city": "Zürich 🏔", "n": 3}, ensure_ascii=False), '{"city":"Bern"}']
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
    for index, (name, text) in enumerate(zip(("weather", "time"), arguments)):
        call = {"index": index, "id": f"call_{index}", "type": "function"}
        deltas.append({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
        for at in range(0, len(text), 5):
            part = {"index": index, "function": {"arguments": text[at : at + 5]}}
            deltas.append({"tool_calls": [part]})
    events = [b": a comment\n\n", b"event: message\r\n"]
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    for delta in [*deltas, {}]:
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "tool_calls"}
        chunk = json.dumps({**common, "choices": [choice]}, ensure_ascii=False)
        events.append(b"data: %b\r\n\r\n" % chunk.encode())
    return b"".join(events) + b"data: [DONE]\n\n"


def torn(data: bytes, seed: int) -> list[bytes]:
    """In pieces of a few bytes, without regard to events, lines and characters."""
    rng = random.Random(seed)
    pieces = []
    while data:
        size = rng.choice([1, 2, 3, 7, 40, 300])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


async def digest(answer: httpx.Response) -> str:
    return hashlib.sha256(b"".join([piece async for piece in answer.aiter_raw()])).hexdigest()


@pytest.mark.parametrize("seed", range(3))
async def test_tool_calls_of_a_worker_pass_as_they_are(tmp_path: Path, seed: int) -> None:
    worker = Pieces(torn(tool_call_stream(), seed))
    worker.turns = asyncio.Semaphore(3 * len(worker.pieces))
    async with gateway_before(worker, tmp_path) as rig:
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "pieces.sock"))
        async with httpx.AsyncClient(transport=transport, base_url="http://w", timeout=60) as direct:
            found = []
            for client in (direct, rig.client):
                async with client.stream("POST", CHAT, json=BODY) as answer:
                    found.append(await digest(answer))
            assert found == [hashlib.sha256(tool_call_stream()).hexdigest()] * 2
        base = f"http://127.0.0.1:{rig.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0) as sdk:
            asked: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
            async with sdk.chat.completions.stream(**asked) as events:
                final = await events.get_final_completion()
        calls = final.choices[0].message.tool_calls or []
        assert [(call.id, call.function.name) for call in calls] == [
            ("call_0", "weather"),
            ("call_1", "time"),
        ]
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Zürich 🏔", "Bern"]


# --- one fleet


def test_a_fleet_started_at_once_after_a_kill_has_one_worker_in_each_slot(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "ok", "stubborn")
    killed, first = start(path)
    killed.kill()
    successor, second = start(path)
    try:
        killed.wait()
        assert first != second
        assert marked(first) == []
        of_slots = Counter(process.environ()[MARK] for process in marked(second))
        # A worker and its engine; none in a second generation.
        assert of_slots == {f"{second}/ok-0.1": 2, f"{second}/stubborn-0.1": 2, f"{second}/gateway.1": 1}
        # Nor is there one that has lost its mark.
        assert Counter(slots_in(tmp_path)) == {"ok-0": 1, "stubborn-0": 1}
    finally:
        successor.terminate()
        successor.communicate(timeout=PATIENCE)
    assert successor.returncode == 0
    assert marked(second) == []
    assert slots_in(tmp_path) == []


def slots_in(folder: Path) -> list[str]:
    """The slot of each living worker process of a fleet in `folder`, by its command line."""
    slots = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "--slot" in words and str(folder) in " ".join(words):
                slots.append(words[words.index("--slot") + 1])
    return slots
