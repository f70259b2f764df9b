"""What an outsider sends: odd requests, odd bodies, too much of something, and reading nothing."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tracemalloc
from pathlib import Path

import pytest

from contracts.errors import ApiError
from gateway import client_protocol, inbound, request_reader
from gateway.asgi import Message
from gateway.inbound import Room
from gateway.server import listen
from tests.gateway import rig as rigs
from tests.gateway.rig import CHAT, Rig, error_of, http_post, one_worker, until

BODY = b'{"model":"m"}'
SMALL = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"


def post(
    path: bytes = CHAT.encode(),
    head: bytes = b"",
    body: bytes = BODY,
    *,
    method: bytes = b"POST",
    version: bytes = b"HTTP/1.1",
    framing: bytes = b"content-length: 13\r\n",
) -> bytes:
    return b"%b %b %b\r\nhost: x\r\n%b%bconnection: close\r\n\r\n%b" % (
        method, path, version, head, framing, body,
    )  # fmt: skip


def chunked(body: bytes, coding: bytes = b"transfer-encoding: chunked\r\n") -> bytes:
    return post(body=body, framing=coding)


# What a proxy in front, or a worker behind, could take for another request than this gateway does; where
# there is a status below 400 exactly one request must reach the worker, with exactly this body.
ODD: dict[str, tuple[bytes, int]] = {
    "underscores": (post(head=b"x_user_id: a\r\ncontent_length: 99\r\ntransfer_encoding: chunked\r\n"), 200),
    "connection names framing": (post(head=b"connection: content-length\r\n"), 200),
    "coding in capitals": (chunked(SMALL, b"Transfer-Encoding: CHUNKED\r\n"), 200),
    "vertical tab before the coding": (chunked(SMALL, b"transfer-encoding:\x0bchunked\r\n"), 400),
    "tab behind the coding": (chunked(SMALL, b"transfer-encoding: chunked\t\r\n"), 400),
    "quoted coding": (chunked(SMALL, b'transfer-encoding: "chunked"\r\n'), 400),
    "list of codings": (chunked(SMALL, b"transfer-encoding: chunked, identity\r\n"), 400),
    "empty element in the coding": (chunked(SMALL, b"transfer-encoding: chunked,\r\n"), 400),
    "extensions of chunks": (chunked(b'd;a="b;c";d\r\n' + BODY + b"\r\n0;x=y\r\n\r\n"), 200),
    "carriage return in an extension": (chunked(b"d;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "extension with an open quote": (chunked(b'd;a="\r\n' + BODY + b"\r\n0\r\n\r\n"), 400),
    "space behind a size": (chunked(b"d \r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "sign before a size": (chunked(b"+d\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "underscore in a size": (chunked(b"0_d\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "line feed behind a size": (chunked(b"d\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "line feed behind a chunk": (chunked(b"d\r\n" + BODY + b"\n0\r\n\r\n"), 400),
    "line feeds at the end": (chunked(b"d\r\n" + BODY + b"\r\n0\n\n"), 400),
    "coding in a trailer": (chunked(SMALL[:-2] + b"transfer-encoding: chunked\r\n\r\n"), 400),
    "host in a trailer": (chunked(SMALL[:-2] + b"host: evil\r\n\r\n"), 200),
    "blank lines before": (b"\r\n\r\n" + post(), 200),
    "space before": (b" " + post(), 400),
    "length with zeros": (post(framing=b"content-length: 0013\r\n"), 200),
    "length with a sign": (post(framing=b"content-length: +13\r\n"), 400),
    "length behind a form feed": (post(framing=b"content-length:\x0c13\r\n"), 400),
    "length in hexadecimal": (post(framing=b"content-length: 0xd\r\n"), 400),
    "no length in its header": (post(framing=b"content-length:\r\n", body=b""), 400),
    "version of two digits": (post(version=b"HTTP/1.10"), 400),
    "version in small letters": (post(version=b"http/1.1"), 400),
    "version 1.2": (post(version=b"HTTP/1.2"), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "tabs in the first line": (b"POST\t/generate\tHTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "header without a colon": (post(head=b"accept\r\n"), 400),
    "header without a name": (post(head=b": x\r\n"), 400),
    "bracket in a name": (post(head=b"a(b: x\r\n"), 400),
    "control in a value": (post(head=b"accept: a\x01b\r\n"), 400),
    "delete in a value": (post(head=b"accept: a\x7fb\r\n"), 400),
    "websocket": (
        post(head=b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"),
        400,
    ),
    "upgrade in 1.0": (post(version=b"HTTP/1.0", head=b"upgrade: h2c\r\n"), 400),
    "method in small letters": (post(method=b"post"), 400),
    "unknown method": (post(method=b"BREW"), 400),
    "method of caches": (post(method=b"PURGE"), 405),
    "trace": (post(method=b"TRACE"), 405),
    "address of another host": (post(b"http://user:pw@evil.example:99" + CHAT.encode()), 200),
    "address without a path": (post(b"http://evil.example"), 400),
    "dots": (post(b"/v1/x/.." + CHAT[3:].encode()), 404),
    "encoded dots": (post(b"/v1/%2e%2e" + CHAT.encode()), 404),
    "two slashes": (post(b"/" + CHAT.encode()), 404),
    "encoded slash": (post(b"/v1%2fchat%2Fcompletions"), 404),
    "slash encoded twice": (post(b"/v1%252Fchat/completions"), 404),
    "encoded letter": (post(b"/v1/ch%61t/completions"), 200),
    "NUL behind the path": (post(CHAT.encode() + b"%00"), 404),
    "parameter of the path": (post(CHAT.encode() + b";a=b"), 404),
    "backslashes": (post(b"\\v1\\chat\\completions"), 400),
    "line break in a model's path": (post(b"/v1/models/a%0d%0ax-evil:%201", method=b"GET"), 404),
    "60 kB of user": (post(head=b"x-user-id: " + b"u" * 60_000 + b"\r\n"), 200),
    "60 kB of request id": (post(head=b"x-request-id: " + b"u" * 60_000 + b"\r\n"), 200),
    "60 kB of trace": (post(head=b"traceparent: " + b"u" * 60_000 + b"\r\n"), 200),
    "user of two lines": (post(head=b"x-user-id: a\r\n b\r\n"), 400),
}


async def test_what_could_be_read_in_two_ways(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        seen = rig.workers[0].requests
        for name, (data, status) in ODD.items():
            before = len(seen)
            raw = await rig.raw(data)
            answers = re.findall(rb"HTTP/1\.1 (\d+) ", raw)
            assert (name, answers) == (name, [str(status).encode()])
            assert b"x-evil" not in raw.partition(b"\r\n\r\n")[0]
            assert [one.body for one in seen[before:]] == ([BODY] if status < 400 else []), name
            for one in seen[before:]:
                assert one.path == CHAT
                assert len(str(one.headers)) < 1000, name
                assert "traceparent" not in one.headers


# As the worker, which reads with the same library, must understand them too: never another model.
BODIES: dict[str, tuple[bytes, str | None]] = {
    "twice: the last counts": (b'{"model":"nope","model":"m"}', None),
    "twice, the other way": (b'{"model":"m","model":"nope"}', "model_not_found"),
    "name of the field in escapes": (b'{"\\u006dodel":"m"}', None),
    "in a message": (b'{"messages":[{"model":"m"}]}', "model_missing"),
    "after much else": (b'{"x":"' + b"y" * 4_000_000 + b'","model":"m"}', None),
    "twice, far apart": (b'{"model":"m","x":"' + b"y" * 100_000 + b'","model":"nope"}', "model_not_found"),
    "a million letters": (b'{"model":"' + b"m" * 1_000_000 + b'"}', "model_not_found"),
    "with a NUL": (b'{"model":"m\\u0000"}', "model_not_found"),
    "half a surrogate": (b'{"model":"m","user":"\\ud800"}', "invalid_json"),
    "half a surrogate in a text": (b'{"model":"m","user":"a\\ud800b"}', "invalid_json"),
    "half a surrogate in a list": (b'{"model":"m","stop":["\\ud83d"]}', "invalid_json"),
    "half a surrogate, in UTF-8": (b'{"model":"m","user":"\xed\xa0\x80"}', "invalid_json"),
    "byte order mark": (b"\xef\xbb\xbf" + BODY, "invalid_json"),
    "UTF-16": (BODY.decode().encode("utf-16"), "invalid_json"),
    "UTF-16 without a mark": (BODY.decode().encode("utf-16-le"), "invalid_json"),
    "numbers without end": (b'{"model":"m","n":' + b"9" * 60_000 + b"}", "invalid_json"),
    "infinite": (b'{"model":"m","n":1e999}', "invalid_json"),
    "depth in place of a name": (b'{"model":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "invalid_json"),
}


async def test_which_model_an_odd_body_names(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for name, (content, code) in BODIES.items():
            response = await rig.client.post(
                CHAT, content=content, headers={"content-type": "text/x; charset=utf-16"}
            )
            assert (name, response.status_code) == (
                name,
                200 if code is None else 404 if "not" in code else 400,
            )
            if code is not None:
                error = error_of(response)
                assert (name, error["code"]) == (name, code)
                assert len(error["message"]) < 400
                if "half" in name and b"\\u" in content:
                    assert "half of a surrogate pair" in error["message"], name
        assert len(rig.workers[0].requests) == sum(code is None for _, code in BODIES.values())


async def test_a_query_of_many_parameters_is_not_taken_apart(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        many = b"&".join([b"a=b"] * 10_000)
        assert b'"code":"invalid_http"' in await rig.raw(
            post(b"%b?%b" % (CHAT.encode(), many), body=b'{"model":"" }')
        )
        assert (await rig.raw(post(b"%b?%b" % (CHAT.encode(), many)))).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_nobody_reads_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an answer that needed none: all of a small one is passed over, and a large one ends the
    connection."""
    monkeypatch.setattr(client_protocol, "MOST_UNREAD", 1 << 20)
    async with one_worker(tmp_path) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        for _ in range(2):
            writer.write(
                b"GET /version HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n" + b"a" * 200_000
            )
            assert b"200 OK" in await reader.readuntil(b"}")
            writer.write(b"a" * 300_000)
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"}")
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            writer.write(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            await asyncio.sleep(0.01)
        assert isinstance(ended.exception(), ConnectionError) or ended.result() == b""
        writer.close()
        assert (await rig.post()).status_code == 200


async def test_the_next_head_is_not_weighed_with_the_body_before_it(tmp_path: Path) -> None:
    """A piece of the network's may hold more of a body than a head may have, and then a head's beginning."""
    async with one_worker(tmp_path) as rig:
        body = b'{"model":"m","x":"' + b"y" * (3 * request_reader.MAX_HEAD) + b'"}'
        first, last = http_post(body), http_post(BODY, b"connection: close\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(first[:1000])
        await until(lambda: rig.server.server_state.connections)
        writer.write(first[1000:] + last[:30])
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(last[30:])
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_who_reads_nothing_is_served_no_further(tmp_path: Path) -> None:
    """Of many requests at once on one connection; what is answered doesn't pile up."""
    async with one_worker(tmp_path) as rig:
        big = json.dumps({"model": "m", "fake": {"do": "big", "size": 4_000_000}}).encode()
        with socket.create_connection(("127.0.0.1", rig.port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            sending = asyncio.create_task(loop.sock_sendall(client, http_post(big) * 5000))
            await until(lambda: len(rig.workers[0].requests) >= 2)
            await asyncio.sleep(0.5)
            assert len(rig.workers[0].requests) < 10
            (connection,) = rig.server.server_state.connections
            assert connection._transport.get_write_buffer_size() < 2_000_000  # type: ignore[union-attr]
            sending.cancel()
        await rig.idle()


async def test_bodies_that_come_in_pieces_have_one_room_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are begun at once. It is there again when they end, in whichever way."""
    monkeypatch.setattr(inbound, "MOST_HELD", 3_000_000)
    async with one_worker(tmp_path, max_body=2_000_000) as rig:
        writers = []
        for count in (1, 2):
            _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1500000\r\n\r\n")
            writer.write(b'{"model":"m","x":"' + b"y" * 1_400_000)
            writers.append(writer)
            while rig.app.proxy._room.held < count * 1_400_000:
                await asyncio.sleep(0.005)
        content = b'{"model":"m","x":"' + b"y" * 900_000 + b'"}'
        response = await rig.client.post(CHAT, content=content)
        assert (response.status_code, error_of(response)["code"]) == (503, "gateway_exhausted")
        assert response.headers["retry-after"] == "1"
        assert (await rig.post()).status_code == 200  # what comes in one piece needs none of it
        assert "pagefleet_gateway_exhausted_total 1.0" in (await rig.client.get("/metrics")).text
        writers[0].write(b"y" * (100_000 - 20) + b'"}')  # whole
        writers[1].close()  # given up
        await until(lambda: rig.app.proxy._room.held == 0)
        assert (await rig.client.post(CHAT, content=content)).status_code == 200
        await until(lambda: rig.app.proxy._room.held == 0)
        writers[0].close()


async def test_a_body_of_tiny_pieces_takes_no_more_than_its_size() -> None:
    left = 50_000

    async def receive() -> Message:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b"%03d" % (left % 1000), "more_body": left > 0}

    room = Room(lambda: None)
    tracemalloc.start()
    try:
        body = await room.read_body(receive, 1 << 30)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) == room.held == 150_000
    assert body.endswith(b"002001000")
    assert peak < 4 * len(body)
    left = 10
    with pytest.raises(ApiError):
        await room.read_body(receive, 20)
    room.free(body)
    assert room.held == 0


async def test_clients_of_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        listen(host := "::1", 0).close()
    except OSError:
        host = "127.0.0.1"  # of a machine without

    def listen_there(_: str, port: int) -> socket.socket:
        return listen(host, port)

    monkeypatch.setattr(rigs, "listen", listen_there)
    rig = Rig(tmp_path, limits={"default": {"qps": 0.001, "burst": 1}})
    rig.route(rigs.target(await rig.worker()))
    async with rig.running():
        for status in (b"200", b"429"):
            reader, writer = await asyncio.open_connection(host, rig.port)
            writer.write(post(b"http://[::1]:80" + CHAT.encode()))
            assert (await reader.read()).split(b" ")[1] == status
            writer.close()


async def test_nothing_that_a_client_chooses_makes_a_metric(tmp_path: Path) -> None:
    """New users, models, ids, traces, conversations and paths with every request, over two replicas."""
    rig = Rig(tmp_path, limits={"default": {"qps": 1000, "concurrency": 10, "tokens_per_minute": 10**9}})
    rig.route(*[rigs.target(await rig.worker(name), slot=name, variant="v") for name in ("a", "b")])
    async with rig.running():

        async def ask(number: int) -> None:
            body = json.dumps(
                {
                    "model": "m",
                    "user": f"user-{number}",
                    "messages": [{"role": "user", "content": f"{number}"}],
                }
            ).encode()
            own = b"x-request-id: r%d\r\ntraceparent: 00-%032x-%016x-01\r\n" % (number, number, number)
            raw = await rig.raw(
                http_post(body, own)
                + http_post(b'{"model":"model-%d"}' % number, own)
                + b"GET /path-%d HTTP/1.1\r\nhost: h%d\r\n\r\n" % (number, number)
                + http_post(b"", b"connection: close\r\n", path="/health")
            )
            assert re.findall(rb"HTTP/1\.1 (\d+) ", raw) == [b"200", b"404", b"404", b"405"]

        async def samples() -> set[str]:
            lines = (await rig.client.get("/metrics")).text.splitlines()
            return {line.rpartition(" ")[0] for line in lines}

        for number in range(1, 20):  # until both replicas were asked
            await ask(number)
        before, board = await samples(), rig.app.metrics.board.read().numbers.keys()
        for number in range(20, 100):
            await ask(number)
        assert await samples() == before
        assert rig.app.metrics.board.read().numbers.keys() == board
        for name in ("user-", "model-", "path-", "r99"):
            assert not [line for line in before if name in line]
