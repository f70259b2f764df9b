"""Requests with numbers, from many users, so many at a time: each must end once, whole, and as it was asked.

Short answers, long ones, and streams, over connections that are kept alive as long as the gateway keeps them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tests.gateway.fake_worker import FakeWorker, sse_event
from tests.gateway.rig import http_post

USERS = 200
LONG = 200_000  # bytes of a long answer
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Lost:
    """A request whose connection ended before its answer; times are time.monotonic's."""

    number: int
    began: float
    ended: float
    why: str


@dataclass
class Load:
    """`connect` makes a connection to the gateways. `whole`: numbers of requests that ended as they should;
    `wrong`: what is wrong with the answers to others."""

    connect: Callable[[], Awaitable[Pair]]
    at_a_time: int = 50
    seed: int = 1
    whole: set[int] = field(default_factory=set)
    wrong: dict[int, str] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._random = random.Random(self.seed)
        self._stopped = False

    async def run(self) -> None:
        """Until `stop`; what has begun by then is finished."""
        await asyncio.gather(*(self._client() for _ in range(self.at_a_time)))

    def stop(self) -> None:
        self._stopped = True

    async def _client(self) -> None:
        while not self._stopped:
            reader, writer = await self.connect()
            try:
                while not self._stopped and await self._one(reader, writer):
                    pass
            finally:
                writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Asks once; whether the connection may be used again."""
        number, began = next(self._numbers), time.monotonic()
        body, expected = self._request(number)
        try:
            writer.write(http_post(body))
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                answer = await _body(reader, head)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.lost.append(Lost(number, began, time.monotonic(), repr(error)))
            return False
        if not head.startswith(b"HTTP/1.1 200 "):
            self.wrong[number] = f"{head[:15]!r} {answer[:300]!r}"
        elif answer != (body if expected is None else expected):
            self.wrong[number] = f"not the answer to it: {len(answer)} bytes, the last are {answer[-100:]!r}"
        else:
            self.whole.add(number)
        return b"connection: close" not in head

    def _request(self, number: int) -> tuple[bytes, bytes | None]:
        """Body, and the answer to it; None: the body itself."""
        kind = self._random.random()
        fake: dict[str, object] = {"do": "echo", "wait": 0.03 * self._random.random()}
        expected, stream, padding = None, False, 0
        if kind < 0.1:
            padding = LONG
        elif kind < 0.4:
            chunks, stream = self._random.randrange(2, 12), True
            fake = {"do": "sse", "chunks": chunks, "delay": 0.02 * self._random.random()}
            expected = b"".join(map(sse_event, range(chunks))) + b"data: [DONE]\n\n"
        user = f"u{self._random.randrange(USERS)}"
        wanted = {"model": "m", "user": user, "stream": stream, "number": number, "fake": fake}
        return json.dumps({**wanted, "padding": "x" * padding}).encode(), expected

    def check(self, workers: Iterable[FakeWorker], kills: Iterable[float] = ()) -> None:
        """Every request ended as it should, and was worked on once; those that a killed gateway held at one
        of `kills` (time.monotonic) are excepted."""
        kills = list(kills)
        assert self.wrong == {}
        unexplained = [
            one for one in self.lost if not any(one.began <= at + 0.5 and at <= one.ended for at in kills)
        ]
        assert unexplained == []
        times: dict[int, int] = {}
        for worker in workers:
            for seen in worker.requests:
                number = json.loads(seen.body)["number"]
                times[number] = times.get(number, 0) + (not seen.refused)
        assert {number: count for number, count in times.items() if count != 1 and number in self.whole} == {}
        assert self.whole <= times.keys()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        return await reader.readexactly(int(length[1]))
    pieces = []
    while size := int(await reader.readline() or b"0", 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(pieces)
