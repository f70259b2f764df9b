"""Requests with numbers, from many users, so many at a time: each must end once, whole, and as it was asked.

Over connections that are kept alive as long as the gateway keeps them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tests.gateway.fake_worker import FakeWorker, sse_event
from tests.gateway.rig import CHAT, http_post

USERS = 200
LONG = 200_000  # bytes of a long answer
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Asked:
    """A request, and whether that is the answer to it."""

    body: bytes
    answered_by: Callable[[bytes], bool]
    path: str = CHAT


@dataclass
class Lost:
    """A request whose connection ended before its answer; times are time.monotonic's."""

    number: int
    began: float
    ended: float
    why: str


def of_fake_worker(number: int, user: str, rng: random.Random) -> Asked:
    """Short answers, long ones, and streams."""
    kind = rng.random()
    fake: dict[str, object] = {"do": "echo", "wait": 0.03 * rng.random()}
    expected, padding = None, 0
    if kind < 0.1:
        padding = LONG
    elif kind < 0.4:
        chunks = rng.randrange(2, 12)
        fake = {"do": "sse", "chunks": chunks, "delay": 0.02 * rng.random()}
        expected = b"".join(map(sse_event, range(chunks))) + b"data: [DONE]\n\n"
    wanted = {"model": "m", "user": user, "stream": expected is not None, "number": number, "fake": fake}
    body = json.dumps({**wanted, "padding": "x" * padding}).encode()
    return Asked(body, (body if expected is None else expected).__eq__)


@dataclass
class Load:
    """`connect` makes a connection to the gateways, `ask` a request of its number and user. `whole`: numbers
    of requests that ended as they should; `wrong`: what is wrong with the answers to others."""

    connect: Callable[[], Awaitable[Pair]]
    ask: Callable[[int, str, random.Random], Asked] = of_fake_worker
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
        asked = self.ask(number, f"u{self._random.randrange(USERS)}", self._random)
        try:
            writer.write(http_post(asked.body, path=asked.path))
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                answer = await _body(reader, head)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.lost.append(Lost(number, began, time.monotonic(), repr(error)))
            return False
        if not head.startswith(b"HTTP/1.1 200 "):
            self.wrong[number] = f"{head[:15]!r} {answer[:300]!r}"
        elif not asked.answered_by(answer):
            self.wrong[number] = f"not the answer to it: {len(answer)} bytes, the last are {answer[-100:]!r}"
        else:
            self.whole.add(number)
        return b"connection: close" not in head

    def check(self, kills: Iterable[float] = ()) -> None:
        """Every request ended as it should; those that a killed gateway held at one of `kills`
        (time.monotonic) are excepted."""
        kills = list(kills)
        assert self.wrong == {}
        unexplained = [
            one for one in self.lost if not any(one.began <= at + 0.5 and at <= one.ended for at in kills)
        ]
        assert unexplained == []

    def check_once(self, workers: Iterable[FakeWorker]) -> None:
        """Fake workers worked once on each request that ended as it should."""
        times = Counter(
            json.loads(seen.body)["number"]
            for worker in workers
            for seen in worker.requests
            if not seen.refused
        )
        assert {number: times[number] for number in self.whole if times[number] != 1} == {}


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        return await reader.readexactly(int(length[1]))
    pieces = []
    while size := int(await reader.readline() or b"0", 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(pieces)
