"""The open port: raw HTTP of all kinds, and the life of the process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from contracts import heads
from gateway import request_reader
from tests.gateway.rig import Rig, http_post, one_worker, target, until

BODY = b'{"model":"m"}'


def answer(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]


CHUNKED = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
CHUNKS = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"
BAD_HTTP = {
    "no request line": b"hello\r\n\r\n",
    "tls": bytes.fromhex("16030100") + b"\x01" * 60,
    "length twice": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 13\r\n\r\n"
    + BODY,
    "length and chunked": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    b"content-length: 4\r\n\r\n" + CHUNKS,
    "chunked twice": CHUNKED + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "chunked, then not": CHUNKED + b"transfer-encoding: identity\r\n\r\n" + CHUNKS,
    "chunked in 1.0": CHUNKED.replace(b"1.1", b"1.0") + b"\r\n" + CHUNKS,
    "hexadecimal chunk": CHUNKED + b"\r\n0x" + CHUNKS,
    "negative chunk": CHUNKED + b"\r\n-" + CHUNKS,
    "endless chunk": CHUNKED + b"\r\n1000000000000000" + CHUNKS,
    "chunk longer than it says": CHUNKED + b"\r\n5" + CHUNKS[1:],
    "line feed in an extension": CHUNKED + b"\r\nd;a\nb" + CHUNKS[1:],
    "length in a trailer": CHUNKED + b"\r\n" + CHUNKS[:-2] + b"content-length: 5\r\n\r\n",
    "line feeds alone": b"POST /generate HTTP/1.1\nhost: x\ncontent-length: 13\n\n" + BODY,
    "list of lengths": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 13, 13\r\n\r\n" + BODY,
    "connect": b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "no number": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "huge number": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    "bad chunk": b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n\r\n",
    "space before colon": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length : 13\r\n\r\n" + BODY,
    "folded header": b"POST /generate HTTP/1.1\r\nhost: x\r\naccept: a\r\n b\r\ncontent-length: 13\r\n\r\n"
    + BODY,
    "bare cr": b"POST /generate HTTP/1.1\r\nhost: x\r\naccept: a\rx-evil: 1\r\ncontent-length: 13\r\n\r\n"
    + BODY,
    "nul": b"POST /generate HTTP/1.1\r\nhost: x\r\naccept: a\0b\r\ncontent-length: 13\r\n\r\n" + BODY,
    "two hosts": b"POST /generate HTTP/1.1\r\nhost: x\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + BODY,
    "two hosts in 1.0": b"POST /generate HTTP/1.0\r\nhost: x\r\nhost: y\r\ncontent-length: 13\r\n\r\n" + BODY,
    "no host": b"POST /generate HTTP/1.1\r\ncontent-length: 13\r\n\r\n" + BODY,
    "version 0.9": b"POST /generate HTTP/0.9\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + BODY,
    "version 2.0": b"POST /generate HTTP/2.0\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + BODY,
    "coding of the content": b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n"
    b"d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "odd coding": b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n" + BODY,
}


async def test_bad_http_gets_400_and_reaches_no_worker(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for name, data in BAD_HTTP.items():
            status, error = answer(await rig.raw(data))
            assert (name, status) == (name, 400)
            assert set(error) == {"message", "type", "param", "code"}
        assert not rig.workers[0].requests
        assert (await rig.post()).status_code == 200


async def test_a_head_over_the_limit_is_431(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        big = b"a" * request_reader.MAX_HEAD
        for data in (
            b"GET /" + big + b" HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nx: " + big + b"\r\n\r\n",
            b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
            b"GET /health HTTP/1.1\r\nx: " + big * 20,
        ):
            status, error = answer(await rig.raw(data))
            assert (status, error["code"]) == (431, "headers_too_large")


async def test_a_body_needs_a_length(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        status, error = answer(await rig.raw(b"POST /generate HTTP/1.1\r\nhost: x\r\n\r\n"))
        assert (status, error["code"]) == (411, "length_required")


async def test_upgrades_are_refused(tmp_path: Path) -> None:
    websocket = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n"
    async with one_worker(tmp_path) as rig:
        for data in (
            b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + websocket + b"\r\n",
            b"GET /health HTTP/1.1\r\nhost: x\r\n" + websocket + b"\r\n",
            http_post(BODY, b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"),
        ):
            status, error = answer(await rig.raw(data))
            assert (status, error["code"]) == (400, "upgrade_not_supported")
        assert not rig.workers[0].requests


async def test_behind_a_connect_nothing_is_read(tmp_path: Path) -> None:
    """It would be in another protocol, and nobody answers it."""
    async with one_worker(tmp_path) as rig:
        raw = await rig.raw(b"CONNECT /health HTTP/1.1\r\nhost: x\r\n\r\n" + http_post(BODY))
        assert raw.startswith(b"HTTP/1.1 405 ")
        assert raw.count(b"HTTP/1.1 ") == 1
        assert not rig.workers[0].requests


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        slow = json.dumps({"model": "m", "fake": {"do": "sse", "chunks": 3, "delay": 0.1}}).encode()
        data = (
            http_post(slow)
            + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            + http_post(BODY, b"connection: close\r\n")
        )
        raw = await rig.raw(data)
        assert raw.count(b"HTTP/1.1 200 OK") == 3
        assert raw.index(b"[DONE]") < raw.index(b'"status":"ok"') < raw.index(b"served_by")


GARBAGE = b"garbage\r\n\r\n"


@pytest.mark.parametrize("queued", [0, 2])
@pytest.mark.parametrize(
    "garbage",
    [GARBAGE, http_post(BODY, b"transfer-encoding: chunked\r\n"), CHUNKED + b"\r\nx\r\n"],
    ids=["request", "head", "body"],
)
async def test_garbage_behind_a_running_request_is_refused_when_that_is_answered(
    tmp_path: Path, garbage: bytes, queued: int
) -> None:
    """It gets into nobody's answer, and what is behind it is never read."""
    async with one_worker(tmp_path) as rig:
        slow = json.dumps({"model": "m", "fake": {"do": "sse", "chunks": 3, "delay": 0.05}}).encode()
        raw = await rig.raw(http_post(slow) + queued * http_post(BODY) + garbage + http_post(BODY))
        *answers, last = re.split(rb"HTTP/1\.1 (?=\d)", raw)[1:]
        assert [one[:3] for one in answers] == (1 + queued) * [b"200"]
        assert b"[DONE]" in answers[0]
        assert answer(b"HTTP/1.1 " + last)[0] == 400
        assert len(rig.workers[0].requests) == 1 + queued
        await rig.idle()


async def test_http_1_0_and_close(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        assert (await rig.raw(http_post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))).endswith(
            b'{"served_by":"w"}'
        )
        assert (await rig.raw(http_post(BODY, b"connection: close\r\n"))).endswith(b'{"served_by":"w"}')


async def test_a_stream_over_http_1_0_has_no_chunks(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        body = b'{"model":"m","stream":true,"fake":{"do":"sse","chunks":3}}'
        raw = await rig.raw(http_post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, stream = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        lines = [line for line in stream.split(b"\n") if line]
        assert len(lines) > 1
        assert all(line.startswith(b"data: ") for line in lines)
        assert lines[-1] == b"data: [DONE]"


async def test_a_request_in_single_bytes(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        for byte in http_post(BODY, b"connection: close\r\n"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await reader.read()).endswith(b'{"served_by":"w"}')
        writer.close()


async def test_requests_that_do_not_arrive_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.3)
    async with one_worker(tmp_path, timeouts={"idle": 0.4}) as rig:
        assert await rig.raw(b"") == b""
        assert answer(await rig.raw(b"GET /health HTT"))[0] == 408
        assert answer(await rig.raw(http_post(BODY)[:-5]))[0] == 408
        once_idle = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        assert (await rig.raw(once_idle + b"GET /heal")).count(b"HTTP/1.1 408") == 1
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(once_idle)
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await reader.read() == b""
        writer.close()
        assert not rig.server.server_state.connections
        assert not rig.workers[0].requests


async def test_a_body_that_keeps_coming_may_take_longer(tmp_path: Path) -> None:
    async with one_worker(tmp_path, timeouts={"idle": 1.5}) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(http_post(BODY, b"connection: close\r\n")[: -len(BODY)])
        for start in range(0, len(BODY), 3):
            writer.write(BODY[start : start + 3])
            await asyncio.sleep(0.4)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_body_that_trickles_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte it could come for as long as `max_body` has bytes, and be silent never."""
    monkeypatch.setattr(heads, "BODY_SECONDS", 0.5)
    async with one_worker(tmp_path) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(http_post(b" " * 100_000)[:-100_000])
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        raw = await reading
        assert answer(raw)[0] == 408
        assert "1024 bytes a second" in answer(raw)[1]["message"]
        writer.close()
        assert not rig.workers[0].requests


async def test_a_body_at_a_rate_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "BODY_SECONDS", 0.3)
    body = BODY + b" " * 400_000
    async with one_worker(tmp_path) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(http_post(body, b"connection: close\r\n")[: -len(body)])
        for start in range(0, len(body), 20_000):
            writer.write(body[start : start + 20_000])
            await asyncio.sleep(0.05)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_what_outlasts_the_drain_limit_is_told_so(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        stream = json.dumps({"model": "m", "fake": {"do": "sse", "stop_at": 2}}).encode()
        waiting = json.dumps({"model": "m", "fake": {"do": "hang"}}).encode()
        running = [asyncio.create_task(rig.raw(http_post(body))) for body in (stream, waiting)]
        await until(lambda: len(rig.workers[0].requests) == 2)
        rig.server.should_exit = True
        streamed, waited = await asyncio.gather(*running)
        assert b"[DONE]" not in streamed
        event = streamed.split(b"data: ")[-1].split(b"\n\n")[0]
        assert json.loads(event)["error"]["code"] == "gateway_shutdown"
        assert answer(waited)[0] == 503
        assert answer(waited)[1]["code"] == "gateway_shutdown"
        await until(lambda: all(seen.closed_at for seen in rig.workers[0].requests))


# --- the process


Start = Callable[..., "subprocess.Popen[bytes]"]


@contextmanager
def processes(rig: Rig) -> Iterator[Start]:
    """Starts ``python -m gateway`` for the rig's routes, on one inherited socket; `rig.port` is its port."""
    source = rig.folder / "model.json"
    source.write_text("{}")
    config = rig.folder / "fleet.yaml"
    config.write_text(
        f"models: [{{name: m, source: 'random:{source}'}}]\nsupervisor: {{drain_timeout: 20s}}\n"
    )
    listener = socket.create_server(("127.0.0.1", 0))
    rig.port = listener.getsockname()[1]
    command = [sys.executable, "-m", "gateway", "--config", config, "--state-dir", rig.folder]
    command += ["--routes", rig.path]
    children = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        with (rig.folder / "log").open("ab") as log:
            child = subprocess.Popen(
                [*command, "--fd", str(listener.fileno()), *options],
                pass_fds=[listener.fileno()],
                stderr=log,
            )
        children.append(child)
        return child

    try:
        yield start
    finally:
        listener.close()
        for child in children:
            child.kill()
            child.wait()


async def post(rig: Rig, body: bytes = BODY) -> bytes:
    return await rig.raw(http_post(body, b"connection: close\r\n"), 60)


async def ended(child: subprocess.Popen[bytes], seconds: float = 60) -> int:
    await until(lambda: child.poll() is not None, seconds)
    return child.returncode


async def test_sigterm_lets_streams_finish_and_exits_0(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    with processes(rig) as start:
        child = start()
        stream = json.dumps({"model": "m", "fake": {"do": "sse", "chunks": 20, "delay": 0.1}}).encode()
        running = asyncio.create_task(post(rig, stream))
        await until(lambda: worker.requests, 60)
        child.terminate()
        assert (await running).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert await ended(child) == 0
    log = (tmp_path / "log").read_text()
    assert "SIGTERM" in log
    assert "Traceback" not in log
    assert len(log.splitlines()) <= 5
    await worker.stop()


async def test_a_restart_refuses_nobody(tmp_path: Path) -> None:
    """The socket is the supervisor's: connections made between two gateways wait for the next one."""
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    with processes(rig) as start:
        first = start()
        assert b"200 OK" in await post(rig)
        first.kill()
        await ended(first)
        waiting = asyncio.create_task(post(rig))
        await asyncio.sleep(0.1)
        second = start()
        assert b"200 OK" in await waiting
        second.terminate()
        assert await ended(second) == 0
    await worker.stop()


async def test_a_paused_process_reads_the_routes_before_it_claims(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    old, new = await rig.worker("old"), await rig.worker("new")
    rig.route(target(old))
    with processes(rig) as start:
        child = start()
        assert b'"old"' in await post(rig)
        child.send_signal(signal.SIGSTOP)
        rig.route(target(new, generation=2))
        waiting = [asyncio.create_task(post(rig)) for _ in range(20)]
        await asyncio.sleep(2.5)
        child.send_signal(signal.SIGCONT)
        for raw in await asyncio.gather(*waiting):
            assert b'"new"' in raw
        assert len(old.requests) == 1
    await old.stop()
    await new.stop()


async def test_it_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    with processes(rig) as start:
        child = start("--parent-pid", str(os.getppid()))  # not the parent it has
        assert await ended(child, 60) == 0
    assert "is gone" in (tmp_path / "log").read_text()
    await worker.stop()


def test_bad_configuration_and_a_port_in_use_exit_2(tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    command = [sys.executable, "-m", "gateway", "--config", str(config)]
    config.write_text("models: [{name: m}]\n")
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "fleet.yaml:1" in bad.stderr
    (tmp_path / "model.json").write_text("{}")
    config.write_text(f"models: [{{name: m, source: 'random:{tmp_path}/model.json'}}]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = subprocess.run([*command, "--port", port], capture_output=True, text=True, check=False)
    assert busy.returncode == 2
    assert f"127.0.0.1:{port}" in busy.stderr
    assert "Traceback" not in bad.stderr + busy.stderr
