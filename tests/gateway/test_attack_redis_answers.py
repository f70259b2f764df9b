"""Answers of Redis that are cut, late, in pieces, or none at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.limits import Granted
from gateway.limits import redis_channel as channels
from gateway.limits.redis_channel import RedisChannel
from gateway.limits.redis_link import Operation, RedisLink
from tests.gateway.redis_limits import PATIENT, Owner, limiting, of
from tests.gateway.redis_server import RedisServer
from tests.gateway.rig import until

pytestmark = pytest.mark.redis


class Hose:
    """Stands between a gateway and Redis: passes answers on late and in pieces, cuts them where it likes."""

    def __init__(self, server: RedisServer, path: Path) -> None:
        self._server = server
        self.path = path
        self.cuts = 0
        self.connections = 0
        self._random = random.Random(7)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with await asyncio.start_unix_server(self._serve, self.path):
            yield f"unix://{self.path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back, forth = await asyncio.open_unix_connection(str(self._server.socket))
        asking = asyncio.create_task(self._pump(reader, forth))
        with contextlib.suppress(ConnectionError):
            while answer := await back.read(1 << 16):
                chance = self._random.random()
                cut = self._random.randrange(len(answer)) + 1
                if chance < 0.3:
                    writer.write(answer[:cut])
                    await asyncio.sleep(0.002)
                    if chance < 0.05:
                        self.cuts += 1
                        break
                    answer = answer[cut:]
                elif chance < 0.5:
                    await asyncio.sleep(0.004)
                writer.write(answer)
        asking.cancel()
        forth.close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)


async def test_no_answer_goes_to_another_request(server: RedisServer, tmp_path: Path) -> None:
    """Answers that are slow, come in pieces or are cut off, and requests that are given up in the middle of
    them: what Redis echoes must be what was asked."""
    hose = Hose(server, tmp_path / "hose.sock")
    echo = "return cmsgpack.unpack(ARGV[1])[1] == 'hold' and cmsgpack.pack({0}) or ARGV[1]"
    right = given_up = failed = 0
    async with hose.running() as url:
        link = RedisLink(url, echo)
        channel = RedisChannel(link, Owner(), 0.03, "{k}:probe")
        await channel.start()
        asked: list[tuple[int, asyncio.Future[list[int]]]] = []
        for number in range(1, 1500):
            with contextlib.suppress(channels.RedisFault):
                asked.append((number, channel.ask(Operation(["{k}"], [number], 1))))
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 4))
            if number % 7 == 0 and asked:
                asked[-1][1].cancel()
        for number, answer in asked:
            try:
                assert await answer == [number]
                right += 1
            except channels.RedisFault:
                failed += 1
            except asyncio.CancelledError:
                given_up += 1
        await until(lambda: not channel.degraded)
        await channel.aclose()
    assert min(right, given_up, failed, hose.cuts) > 0


async def test_a_link_that_is_closed_before_it_could_begin(tmp_path: Path) -> None:
    """Python warns of a coroutine that nobody ever awaited, which fails this test."""
    link = RedisLink(f"unix://{tmp_path}/nobody.sock")
    link.send([Operation(["{k}"], ["hold", "{k}", 1, 1, "l"], 1)], PATIENT, print)
    await link.aclose()
    await asyncio.sleep(0)
    gc.collect()


class Liar:
    """Speaks RESP and answers every command alike, after those by which a connection is made."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.path = path
        self._answer = answer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with await asyncio.start_unix_server(self._serve, self.path):
            yield f"unix://{self.path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while command := await reader.read(1 << 16):
                made = command.count(b"CLIENT") or command.count(b"SELECT")
                writer.write(b"+OK\r\n" * made if made else self._answer)
        writer.close()


NO_ANSWERS = {
    "number": b":1\r\n",
    "null": b"$-1\r\n",
    "empty": b"$0\r\n\r\n",
    "short": b"$1\r\n1\r\n",
    "two": b"$1\r\n1\r\n$1\r\n1\r\n",
    "list": b"*2\r\n:1\r\n:1\r\n",
    "endless": b"$999999999999\r\n1",
    "endless list": b"*1000000000\r\n",
    "error": b"-ERR no\r\n",
    "HTTP": b"HTTP/1.1 200 OK\r\n\r\n",
    "zeros": b"\x00" * 100,
    "words": b"$5\r\nhello\r\n",
}


@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_what_is_no_answer_of_redis_fails_no_request(tmp_path: Path, name: str) -> None:
    liar = Liar(tmp_path / "liar.sock", NO_ANSWERS[name])
    async with liar.running() as url, limiting(url, budget=0.05) as limiter:
        for _ in range(20):
            granted = await limiter.acquire(of("ann", qps=1000, concurrency=100))
            assert isinstance(granted, Granted)
            granted.release()
            await asyncio.sleep(0.002)
        assert limiter.state.faults > 0
