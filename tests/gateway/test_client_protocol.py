"""A client's connection and the exchanges on it: what ASGI and uvicorn leave open."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from contracts import heads
from gateway.asgi import Headers, Message, Receive, Scope, Send
from gateway.exchange import Exchange
from tests.gateway.rig import http_post, one_worker, until

PLAIN = [(b"content-type", b"text/plain")]


def stream(**fake: Any) -> bytes:
    return http_post(json.dumps({"model": "m", "stream": True, "fake": {"do": "sse", **fake}}).encode())


async def test_a_streams_head_does_not_wait_for_its_first_event(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(stream(gate_at=0))
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        rig.workers[0].gate.set()
        assert b"token" in await reader.readuntil(b"[DONE]")
        writer.close()


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        rig.server.config.timeout_keep_alive = 1
        started = asyncio.get_running_loop().time()
        raw = await rig.raw(stream(chunks=16, delay=0.1))
        assert raw.endswith(b"0\r\n\r\n")
        assert asyncio.get_running_loop().time() - started > 2
        raw = await rig.raw(http_post(b'{"model":"m"}') + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert raw.count(b"200 OK") == 2


async def test_half_a_head_behind_a_running_request_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    async with one_worker(tmp_path, timeouts={"idle": 2}) as rig:
        raw = await rig.raw(stream(chunks=10, delay=0.1) + b"GET /health HTT")
        assert b"[DONE]" in raw
        assert b"HTTP/1.1 408" in raw  # once its turn has come


def chunked(headers: bytes, body: bytes) -> bytes:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%btransfer-encoding: chunked"
    )
    return head % headers + b"\r\n\r\n%x\r\n%b\r\n" % (len(body), body)


async def test_trailers_say_nothing(tmp_path: Path) -> None:
    """They come when it has been decided already who asks, and no proxy has looked at them."""
    async with one_worker(tmp_path, limits={"default": {"qps": 0.001, "burst": 1}}) as rig:
        trailers = b"0\r\nx-user-id: bob\r\ntraceparent: 00-%b-%b-01\r\nx-pad: 1\r\n\r\n" % (
            b"a" * 32,
            b"b" * 16,
        )
        for status in (b"200", b"429"):
            raw = await rig.raw(chunked(b"x-user-id: ann\r\n", b'{"model":"m"}') + trailers)
            assert raw.split(b" ")[1] == status
        assert "traceparent" not in rig.workers[0].requests[0].headers


@pytest.mark.parametrize(
    "endless", [b"0\r\nx: " + b"y" * 1000, b"1;" + b"y" * 1000], ids=["trailer", "extension"]
)
async def test_framing_without_a_body_has_an_end(tmp_path: Path, endless: bytes) -> None:
    async with one_worker(tmp_path) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(chunked(b"", b'{"model":"m"') + endless)
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        while not answer.done():
            writer.write(b"y" * 4000)
            await asyncio.sleep(0.001)
        assert (await answer).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_an_http_1_0_client_is_told_nothing_in_between(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        head = b"POST /v1/chat/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 13\r\n\r\n"
        assert (await rig.raw(head + b'{"model":"m"}')).startswith(b"HTTP/1.1 200 ")


async def test_addresses_in_every_form(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for address in (b"/health", b"http://some.host/health", b"/%68ealth", b"/health?a=/b#c", b"//health"):
            raw = await rig.raw(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % address)
            assert raw.startswith(b"HTTP/1.1 404" if address == b"//health" else b"HTTP/1.1 200"), address
        for address in (b"*", b"some.host:80", b"/\xff"):
            raw = await rig.raw(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % address)
            assert raw.startswith(b"HTTP/1.1 4"), address


async def test_the_next_request_is_served_after_a_refused_one(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        raw = await rig.raw(
            http_post(b"no json")
            + http_post(b'{"model":"who"}')
            + http_post(b'{"model":"m"}', b"connection: close\r\n")
        )
        assert [line.split(b" ")[1] for line in raw.split(b"HTTP/1.1")[1:]] == [b"400", b"404", b"200"]
        await until(lambda: not rig.server.server_state.tasks)


class Wire:
    """Keeps what an exchange writes."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.write_paused = False
        self.default_lines = b"date: today\r\n"
        self.written: list[bytes] = []
        self.closed = False
        self.answers = 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def drain(self) -> None:
        self.write_paused = False

    def close(self) -> None:
        self.closed = True

    def resume_reading(self) -> None:
        pass

    def answered(self, exchange: Exchange) -> None:
        self.answers += 1


def exchange(method: str = "POST", version: str = "1.1") -> tuple[Wire, Exchange]:
    wire = Wire()
    return wire, Exchange(wire, {"method": method, "http_version": version}, True, False)


def start(headers: Headers, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_head_and_first_piece_leave_together() -> None:
    wire, one = exchange()
    await one.send(start(PLAIN))
    assert wire.written == []
    await one.send(body(b"abc", more=True))
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    assert wire.written == [head + b"3\r\nabc\r\n"]
    await one.send(body(b""))
    assert wire.written[1:] == [b"0\r\n\r\n"]
    assert one.complete
    assert wire.answers == 1


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_answers_without_a_body(method: str, status: int) -> None:
    wire, one = exchange(method)
    await one.send(start([(b"content-length", b"3")], status))
    await one.send(body(b"abc"))
    assert b"".join(wire.written).endswith(b"content-length: 3\r\n\r\n")
    assert one.complete


@pytest.mark.parametrize("pieces", [[b"abcd"], [b"ab", b"cd"], [b"ab"], [b""]])
async def test_a_body_of_another_length_than_its_head_says(pieces: list[bytes]) -> None:
    wire, one = exchange()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start([(b"content-length", b"3")]))
        for piece in pieces:
            await send(body(piece, more=piece is not pieces[-1]))

    task = asyncio.current_task()
    assert task is not None
    await one.run(app, task)
    assert wire.closed
    assert not one.complete


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_never_becomes_two(value: bytes) -> None:
    wire, one = exchange()
    with pytest.raises(RuntimeError):
        await one.send(start([(b"x-a", value)]))
    assert wire.written == []


async def test_who_leaves_is_noticed_once() -> None:
    _, one = exchange()
    calls: list[int] = []
    one.on_leave = lambda: calls.append(1)
    waiting = asyncio.create_task(one.receive())
    await asyncio.sleep(0)
    one.leave()
    one.leave()
    assert (await waiting)["type"] == "http.disconnect"
    assert calls == [1]
    await one.send(start(PLAIN))  # nobody is there, and nobody is told
    await one.send(body(b"abc"))


async def test_a_body_arrives_in_order_and_ends_once() -> None:
    _, one = exchange()
    one.feed(b"a")
    one.feed(b"b")
    assert await one.receive() == {"type": "http.request", "body": b"ab", "more_body": True}
    waiting = asyncio.create_task(one.receive())
    await asyncio.sleep(0)
    one.feed_end()
    assert await waiting == {"type": "http.request", "body": b"", "more_body": False}
    waiting = asyncio.create_task(one.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    one.leave()
    assert (await waiting)["type"] == "http.disconnect"
