"""Requests with numbers, from many users, so many at a time: each must end once, whole, and as it was asked.

Over connections that are kept alive as long as the gateway keeps them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tests.gateway.fake_worker import FakeWorker, sse_event
from tests.gateway.rig import CHAT, http_post

USERS = 200
LONG = 200_000  # bytes of a long answer
_TARGET = re.compile(rb"x-pagefleet-target: (\S+)")
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Asked:
    """A request, and whether that is the answer to it."""

    body: bytes
    answered_by: Callable[[bytes], bool]
    path: str = CHAT
    kind: str = ""


@dataclass(slots=True)
class Ended:
    """A request that is over. Times are time.monotonic's, `first` that of the answer's first byte; `port` is
    the client's, `target` who answered by the gateway's word, `why` what is wrong with the answer."""

    number: int
    kind: str
    port: int
    began: float
    first: float | None = None
    ended: float = 0.0
    target: str = ""
    why: str = ""


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
    """`connect` makes a connection to the gateways, `ask` a request of its number and user. `pause`: seconds
    that a client waits after an answer, on average. By number, `whole`: requests that ended as they should,
    `wrong`: those that had another answer; `lost`: those whose connection ended before their answer."""

    connect: Callable[[], Awaitable[Pair]]
    ask: Callable[[int, str, random.Random], Asked] = of_fake_worker
    at_a_time: int = 50
    seed: int = 1
    pause: float = 0.0
    whole: dict[int, Ended] = field(default_factory=dict)
    wrong: dict[int, Ended] = field(default_factory=dict)
    lost: list[Ended] = field(default_factory=list)

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
        if self.pause:
            await asyncio.sleep(self._random.expovariate(1 / self.pause))
        number = next(self._numbers)
        asked = self.ask(number, f"u{self._random.randrange(USERS)}", self._random)
        one = Ended(number, asked.kind, _port(writer), time.monotonic())
        try:
            writer.write(http_post(asked.body, path=asked.path))
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                one.first = time.monotonic()
                target = _TARGET.search(head)
                one.target = sys.intern(target[1].decode()) if target is not None else ""
                answer = await _body(reader, head)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            one.ended, one.why = time.monotonic(), repr(error)
            self.lost.append(one)
            return False
        one.ended = time.monotonic()
        if not head.startswith(b"HTTP/1.1 200 "):
            one.why = f"{head[:15]!r} {answer[:300]!r}"
        elif not asked.answered_by(answer):
            one.why = f"not the answer to it: {len(answer)} bytes, the last are {answer[-100:]!r}"
        (self.wrong if one.why else self.whole)[number] = one
        return b"connection: close" not in head

    def check(self, cut: Iterable[int] = ()) -> None:
        """Every request ended as it should; excepted is one on each of the connections, by the client's port,
        that a killed gateway held."""
        excused = Counter(cut)
        assert self.wrong == {}
        unexplained = []
        for one in self.lost:
            if not excused[one.port]:
                unexplained.append(one)
            excused[one.port] -= 1
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


def _port(writer: asyncio.StreamWriter) -> int:
    """0 on a Unix socket."""
    name = writer.get_extra_info("sockname")
    return int(name[1]) if isinstance(name, tuple) else 0


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        return await reader.readexactly(int(length[1]))
    pieces = []
    while size := int(await reader.readline() or b"0", 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(pieces)
