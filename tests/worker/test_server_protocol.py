"""A worker's connections: what comes before a body is bounded, in bytes and in time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from contracts import heads
from tests.worker.fake_engine import MODEL, FakeEngine, eventually, make_state, serving
from worker.server.state import ServerState

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


async def raw(state: ServerState, *pieces: bytes) -> bytes:
    """All that comes back on one connection until the worker ends it."""
    async with serving(state) as url, asyncio.timeout(60):
        reader, writer = await connect(url)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
        return answer


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "pieces",
    [
        [GET + b"x: " + b"y" * heads.MAX_HEAD + b"\r\n\r\n"],
        [GET, b"x: ", *[b"y" * 8192] * 9],
        [GET, *[b"".join(b"x-%d: y\r\n" % i for i in range(9000))]],
        [b"GET /", *[b"a" * 8192] * 9],
        [CHUNKED + b"\r\n1;", *[b"e" * 65536] * 9],
        [CHUNKED + b"\r\n2\r\n{}\r\n0\r\n", *[b"t: " + b"e" * 65536 + b"\r\n"] * 9],
    ],
    ids=["one piece", "a value", "many headers", "a path", "chunk extensions", "trailers"],
)
async def test_what_comes_before_a_body_is_bounded(pieces: list[bytes]) -> None:
    answer = await raw(make_state(), *pieces)
    assert error_of(answer) == (431, "headers_too_large")


async def test_a_head_as_large_as_it_may_be_is_served() -> None:
    room = heads.MAX_HEAD - len(GET) - len(b"connection: close\r\nx: \r\n\r\n")
    answer = await raw(make_state(), GET + b"connection: close\r\nx: " + b"y" * room + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


async def test_bodies_and_heads_that_follow_are_no_head() -> None:
    large = json.dumps({"model": MODEL, "prompt": "x" * (3 * heads.MAX_HEAD)}).encode()
    post = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(large), large)
    answer = await raw(make_state(), post * 3 + GET + b"connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    "piece",
    [b"\x16\x03\x01\x02\x00\r\n\r\n", GET + b"content-length: -5\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
async def test_what_is_no_http_gets_the_error_that_all_get(piece: bytes) -> None:
    assert error_of(await raw(make_state(), piece)) == (400, "invalid_http")


async def test_a_head_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    assert error_of(await raw(make_state(), GET)) == (408, "request_timeout")
    assert await raw(make_state()) == b""  # nothing was asked
    post = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    answer = await raw(make_state(), post, GET)  # half a head behind a request
    assert answer.startswith(b"HTTP/1.1 200")
    assert error_of(answer[answer.rindex(b"HTTP/1.1") :]) == (408, "request_timeout")


async def test_a_request_that_runs_is_not_cut_by_the_time_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.05)
    engine = FakeEngine(paused=True)
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(make_state(engine)) as url, asyncio.timeout(60):
        reader, writer = await connect(url)
        writer.write(head + body)
        await eventually(lambda: engine.in_flight == 1)
        writer.write(b"GET /ver")  # the next one begins, and does not go on
        await asyncio.sleep(0.3)
        assert engine.in_flight == 1
        engine.paused = False
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1 408") == 1


async def test_what_is_wrong_behind_a_running_answer_does_not_get_into_it() -> None:
    engine = FakeEngine(paused=True)
    body = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(make_state(engine)) as url, asyncio.timeout(60):
        reader, writer = await connect(url)
        writer.write(head + body)
        await eventually(lambda: engine.in_flight == 1)
        writer.write(b"no HTTP\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await eventually(lambda: engine.in_flight == 0)  # it is aborted, as if the client had left
    assert b"invalid_http" not in answer


async def test_trailers_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    engine = FakeEngine()
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
    monkeypatch.setattr(engine, "submit", _noting(engine, seen))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    trailers = b"0\r\nx-request-timeout: 5\r\nx-pagefleet-priority: high\r\n\r\n"
    answer = await raw(make_state(engine), head + b"%x\r\n%b\r\n" % (len(body), body) + trailers)
    assert answer.startswith(b"HTTP/1.1 200")
    assert [request.deadline for request in seen] == [0.0]


def _noting(engine: FakeEngine, seen: list[Any]) -> Any:
    submit = engine.submit

    def noted(request: Any) -> Any:
        seen.append(request)
        return submit(request)

    return noted


@pytest.mark.parametrize(
    ("head", "hosts"),
    [
        (b"GET /version HTTP/1.1\r\n", 0),
        (b"GET /version HTTP/1.1\r\nhost: x\r\nHost: x\r\n", 2),
        (b"GET /version HTTP/1.0\r\nhost: x\r\nhost: y\r\n", 2),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\n", 0),
    ],
)
async def test_a_request_names_one_host(head: bytes, hosts: int) -> None:
    answer = await raw(make_state(), head + b"\r\n")
    assert error_of(answer) == (400, "invalid_http")
    assert b"exactly one Host header, not %d" % hosts in answer


async def test_http_1_0_needs_no_host() -> None:
    assert (await raw(make_state(), b"GET /version HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", [b"/tokenize", b"/nothing/here"], ids=["read", "answered before its end"])
async def test_a_body_that_trickles_has_an_end(path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "BODY_SECONDS", 0.3)
    async with serving(make_state()) as url, asyncio.timeout(60):
        reader, writer = await connect(url)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" % path)
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        answer = await reading
        writer.close()
    assert error_of(answer[answer.rindex(b"HTTP/1.1") :]) == (408, "request_timeout")
    assert b"1024 bytes a second" in answer


async def test_a_body_at_a_rate_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "BODY_SECONDS", 0.2)
    body = BODY + b" " * 400_000
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    async with serving(make_state()) as url, asyncio.timeout(60):
        reader, writer = await connect(url)
        writer.write(head)
        for start in range(0, len(body), 20_000):
            writer.write(body[start : start + 20_000])
            await asyncio.sleep(0.03)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_body_behind_a_running_request_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "BODY_SECONDS", 0.05)
    engine = FakeEngine(paused=True)
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with serving(make_state(engine)) as url, asyncio.timeout(60):
        reader, writer = await connect(url)
        writer.write(head % len(body) + body + head % len(body) + body[:-1])
        await eventually(lambda: engine.in_flight == 1)
        await asyncio.sleep(0.3)
        assert engine.in_flight == 1
        engine.paused = False
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert error_of(answer[answer.rindex(b"HTTP/1.1") :]) == (408, "request_timeout")
