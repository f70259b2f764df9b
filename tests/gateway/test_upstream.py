from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from gateway.connection import HIGH_WATER, Connection, UpstreamError
from gateway.settings import Timeouts
from gateway.upstream import Upstream, parse_address
from tests.gateway.fake_worker import FakeWorker, sse_event
from tests.gateway.rig import until


@pytest_asyncio.fixture(params=["unix", "tcp"])
async def worker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start(str(tmp_path / "w.sock") if request.param == "unix" else None)
    yield fake
    await fake.stop()


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    pool = Upstream()
    yield pool
    pool.close()
    await asyncio.sleep(0)


def timeouts(**seconds: float) -> Timeouts:
    return Timeouts.model_validate({"connect": 5, "first_byte": 20, "idle": 20, "total": 60, **seconds})


@asynccontextmanager
async def exchange(
    upstream: Upstream, address: str, limits: Timeouts | None = None, **fake: Any
) -> AsyncIterator[Connection]:
    limits = limits or timeouts()
    connection = upstream.take(address) or await upstream.connect(address, limits.connect)
    body = json.dumps({"fake": fake}).encode()
    head = b"POST /x HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n" % len(body)
    try:
        connection.start(
            head, body, limits, limits.first_byte, asyncio.get_running_loop().time() + limits.total
        )
        await connection.head()
        yield connection
    finally:
        upstream.give_back(connection)


async def whole(connection: Connection) -> bytes:
    pieces = []
    while piece := await connection.read():
        pieces.append(piece)
    return b"".join(pieces)


async def fetch(upstream: Upstream, worker: FakeWorker, limits: Timeouts | None = None, **fake: Any) -> bytes:
    async with exchange(upstream, worker.address, limits, **fake) as connection:
        return await whole(connection)


async def failure(
    upstream: Upstream, worker: FakeWorker, limits: Timeouts | None = None, **fake: Any
) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await fetch(upstream, worker, limits, **fake)
    return caught.value


async def test_connections_are_kept_and_used_again(upstream: Upstream, worker: FakeWorker) -> None:
    for _ in range(20):
        assert await fetch(upstream, worker) == b'{"served_by":"w"}'
    assert worker.accepted == 1
    assert upstream.idle_connections == upstream.open_connections == 1


async def test_tcp_goes_out_without_delay(upstream: Upstream) -> None:
    worker = await FakeWorker().start()
    async with exchange(upstream, worker.address) as connection:
        raw = connection._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await whole(connection)
    await worker.stop()


async def test_a_response_in_single_bytes(upstream: Upstream, worker: FakeWorker) -> None:
    assert await fetch(upstream, worker, do="split") == b'{"split":true}'
    assert upstream.idle_connections == 1


async def test_a_stream_arrives_as_it_was_sent(upstream: Upstream, worker: FakeWorker) -> None:
    expected = b"".join(map(sse_event, range(300))) + b"data: [DONE]\n\n"
    assert await fetch(upstream, worker, do="sse", chunks=300) == expected
    assert upstream.idle_connections == 1


async def test_a_slow_reader_makes_the_worker_wait(upstream: Upstream, worker: FakeWorker) -> None:
    size = 32 * 1024**2
    async with exchange(upstream, worker.address, do="big", size=size) as connection:
        await asyncio.sleep(0.3)
        assert connection._buffered < HIGH_WATER + 1024**2
        assert not worker.requests[0].answered
        total, digest_ok = 0, True
        pattern = bytes(range(256))
        while piece := await connection.read():
            digest_ok &= piece[0] == pattern[total % 256]
            total += len(piece)
    assert total == size
    assert digest_ok
    assert await fetch(upstream, worker) == b'{"served_by":"w"}'
    assert worker.accepted == 1


@pytest.mark.parametrize("do", ["no_keep_alive", "extra"])
async def test_a_connection_that_must_not_be_used_again(
    upstream: Upstream, worker: FakeWorker, do: str
) -> None:
    assert await fetch(upstream, worker, do=do) == b"{}"
    assert upstream.idle_connections == 0
    assert await fetch(upstream, worker) == b'{"served_by":"w"}'
    assert worker.accepted == 2


async def test_an_idle_connection_that_the_worker_closes_is_forgotten(
    upstream: Upstream, worker: FakeWorker
) -> None:
    await fetch(upstream, worker)
    worker.drop_idle()
    await until(lambda: upstream.open_connections == 0)
    assert await fetch(upstream, worker) == b'{"served_by":"w"}'


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
async def test_a_request_that_a_closed_connection_never_read_is_untouched(
    upstream: Upstream, tmp_path: Path, family: socket.AddressFamily
) -> None:
    """The race of every keep-alive pool: the worker closes, the next request is written before we know."""
    with socket.socket(family) as listener:
        listener.bind(str(tmp_path / "s") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        name = listener.getsockname()
        address = f"unix:{name}" if family == socket.AF_UNIX else f"http://127.0.0.1:{name[1]}"
        upstream.give_back(connection := await upstream.connect(address, 5))
        assert not upstream.idle_connections  # nothing was asked on it yet
        connection = await upstream.connect(address, 5)
        listener.accept()[0].close()
        served, _ = listener.accept()
        connection.start(
            b"POST / HTTP/1.1\r\n\r\n", b"", timeouts(), 20, asyncio.get_running_loop().time() + 60
        )
        served.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        assert await whole(connection) == b"{}"
        upstream.give_back(connection)
        served.recv(1000)
        served.close()
        with pytest.raises(UpstreamError) as caught:
            async with exchange(upstream, address) as again:
                await whole(again)
        assert connection.reused
        assert caught.value.untouched


async def test_a_worker_that_read_the_request_and_died_is_not_untouched(
    upstream: Upstream, worker: FakeWorker
) -> None:
    await fetch(upstream, worker)
    error = await failure(upstream, worker, do="eof", wait=0.05)
    assert (error.kind, error.untouched) == ("broken", False)
    assert len(worker.requests) == 2


@pytest.mark.parametrize("do", ["garbage", "unframed", "framed_before"])
async def test_what_is_no_valid_response(upstream: Upstream, worker: FakeWorker, do: str) -> None:
    error = await failure(upstream, worker, do=do)
    assert (error.kind, error.untouched) == ("protocol", False)
    assert upstream.idle_connections == 0


async def test_a_short_body_is_an_error_after_what_came(upstream: Upstream, worker: FakeWorker) -> None:
    async with exchange(upstream, worker.address, do="short") as connection:
        assert await connection.read() == b'{"only":'
        with pytest.raises(UpstreamError):
            await connection.read()


async def test_connection_refused(upstream: Upstream, tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/nobody.sock", "http://127.0.0.1:1"):
        with pytest.raises(UpstreamError) as caught:
            await upstream.connect(address, 5)
        assert (caught.value.kind, caught.value.untouched) == ("connect", True)
    assert upstream.open_connections == 0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("left", range(4))
def test_a_name_that_cannot_be_looked_up_for_want_of_descriptors_is_our_own_fault(
    new_loop: Callable[[], asyncio.AbstractEventLoop], left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever of them the look-up finds: it says that there is no such name, in most cases."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(look_up(left))
    assert caplog.messages == ["no connection to a worker can be made: Too many open files"]


async def look_up(left: int) -> None:
    address, pool = "http://worker.invalid:8000", Upstream()
    with pytest.raises(UpstreamError) as caught:
        await pool.connect(address, 60)
    assert caught.value.kind == "connect"  # and what this needed to look names up at all is there now
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        null = os.open(os.devnull, os.O_RDONLY)
        taken.callback(os.close, null)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        free = []
        with contextlib.suppress(OSError):
            while True:
                free.append(os.dup(null))
        for descriptor in free[left:]:
            taken.callback(os.close, descriptor)
        for descriptor in free[:left]:
            os.close(descriptor)
        with pytest.raises(UpstreamError) as caught:
            await pool.connect(address, 60)
    assert (caught.value.kind, caught.value.untouched) == ("exhausted", True)
    with pytest.raises(UpstreamError) as caught:
        await pool.connect(address, 60)
    assert caught.value.kind == "connect"


async def test_a_listener_with_a_full_queue_is_waited_for(upstream: Upstream, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "busy.sock"))
    listener.listen(0)
    address = f"unix:{tmp_path}/busy.sock"
    first = await upstream.connect(address, 5)
    with pytest.raises(UpstreamError) as caught:
        await upstream.connect(address, 0.2)
    assert caught.value.kind == "connect"
    waiting = asyncio.create_task(upstream.connect(address, 10))
    await asyncio.sleep(0.05)
    accepted, _ = listener.accept()
    second = await waiting
    for connection in (first, second):
        connection.close()
    accepted.close()
    listener.close()


@pytest.mark.parametrize(
    ("limits", "fake", "what"),
    [
        ({"first_byte": 0.2}, {"do": "hang"}, "first_byte"),
        ({"first_byte": 0.2}, {"do": "json", "wait": 30}, "first_byte"),
        ({"idle": 0.2}, {"do": "sse", "stop_at": 3}, "idle"),
        ({"total": 0.3}, {"do": "sse", "chunks": 1000, "delay": 0.01}, "total"),
    ],
)
async def test_timeouts(
    upstream: Upstream, worker: FakeWorker, limits: dict[str, float], fake: dict[str, Any], what: str
) -> None:
    began = time.monotonic()
    error = await failure(upstream, worker, timeouts(**limits), **fake)
    assert error.kind == "timeout"
    assert f"timeouts.{what}" in str(error)
    assert time.monotonic() - began < 15
    await until(lambda: worker.requests[0].closed_at is not None)


async def test_a_short_idle_limit_holds_after_exchanges_that_were_quick(
    upstream: Upstream, worker: FakeWorker
) -> None:
    limits = timeouts(idle=0.3, first_byte=20)
    for _ in range(3):
        await fetch(upstream, worker, limits)
        await asyncio.sleep(0.15)
    assert (await failure(upstream, worker, limits, do="sse", stop_at=2)).kind == "timeout"


async def test_pieces_within_the_idle_limit_may_take_longer_together(
    upstream: Upstream, worker: FakeWorker
) -> None:
    limits = timeouts(idle=2.0, first_byte=2.0)
    assert (await fetch(upstream, worker, limits, do="sse", chunks=5, delay=0.5)).endswith(b"[DONE]\n\n")


async def test_cancelled_request_closes_its_connection(upstream: Upstream, worker: FakeWorker) -> None:
    task = asyncio.create_task(fetch(upstream, worker, do="hang"))
    await until(lambda: worker.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: worker.requests[0].closed_at is not None)
    await until(lambda: upstream.open_connections == 0)


async def test_connections_to_targets_that_are_gone_are_closed(
    upstream: Upstream, worker: FakeWorker
) -> None:
    await fetch(upstream, worker)
    upstream.retain({worker.address})
    assert upstream.idle_connections == 1
    upstream.retain(set())
    await until(lambda: upstream.open_connections == 0 and not worker.connections)


@pytest.mark.parametrize(
    "address", ["unix:relative", "http://host", "https://host:1", "http://host:1/path", "x"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        parse_address(address)


def test_addresses() -> None:
    assert parse_address("unix:/run/w.sock") == "/run/w.sock"
    assert parse_address("http://127.0.0.1:9001") == ("127.0.0.1", 9001)
    assert parse_address("http://[::1]:9001") == ("::1", 9001)


async def test_a_connection_whose_making_is_cancelled_leaves_nothing(
    upstream: Upstream, worker: FakeWorker
) -> None:
    for turns in range(8):
        for _ in range(5):
            making = asyncio.create_task(upstream.connect(worker.address, 1))
            for _ in range(turns):
                await asyncio.sleep(0)
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await making).close()
    await until(lambda: not upstream.open_connections and not worker.connections)
