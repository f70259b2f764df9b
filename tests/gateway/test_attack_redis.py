"""Attacks on limits by way of Redis: what others write there, cut connections, answers in pieces, clocks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.limits import Charge, Granted, Limit, Refused
from gateway.limits import redis_channel as channels
from gateway.limits.bounds import Bounds
from gateway.limits.overrides import Entry, OverridesFile, OverridesUnusable
from gateway.limits.redis_channel import RedisChannel
from gateway.limits.redis_limiter import RedisLimiter
from gateway.limits.redis_link import SCRIPT, Done, Operation, RedisLink
from gateway.limits.redis_overrides import RedisOverrides
from gateway.limits.rules import LeaseRule, Scope
from tests.gateway.redis_server import RedisServer, running
from tests.gateway.rig import until

pytestmark = pytest.mark.redis
PATIENT = 20.0  # seconds that Redis has where it is well, however busy the machine is


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running(tmp_path / "redis") as server:
        yield server


@contextlib.asynccontextmanager
async def limiting(url: str, **options: Any) -> AsyncIterator[RedisLimiter]:
    limiter = RedisLimiter(url, **{"budget": PATIENT, **options})
    await limiter.start()
    try:
        yield limiter
    finally:
        await limiter.aclose()


def of(user: str, **bounds: Any) -> list[Charge]:
    return [Charge.of_user(user, Limit(**bounds))]


def key(user: str, kind: str) -> str:
    return f"pagefleet:{{u:{user}}}:user:{user}:{kind}"


class _Link(RedisLink):
    """Fails the operations whose numbers are in `failing`; probes find it well."""

    def __init__(self) -> None:
        self.address = "redis://nowhere"
        self.failing = {1, 2}
        self.ran = 0

    def send(self, operations: Sequence[Operation], within: float, done: Done) -> None:
        self.ran += 1
        outcome = ConnectionError() if self.ran in self.failing else [[1] for _ in operations]
        asyncio.get_running_loop().call_soon(done, outcome)

    async def probe(self, key: str, within: float) -> None:
        """It is well."""

    def hang_up(self) -> None:
        """There is nothing."""


class _Owner:
    """Asks for something as soon as Redis is well, as a limiter renews its leases."""

    channel: RedisChannel | None = None

    def lost(self, operation: Operation) -> None: ...

    def unwanted(self, operation: Operation, answer: list[int]) -> None: ...

    async def well_again(self) -> None:
        if self.channel is not None:
            with contextlib.suppress(channels.RedisFault):
                await self.channel.ask(Operation(["{k}"], ["hold"], 1))


class _Slow(RedisLink):
    """Keeps what it is to send until it is told that it was done."""

    def __init__(self) -> None:
        self.address = "redis://nowhere"
        self.lists: list[list[Any]] = []
        self.answer: Callable[[], None]

    def send(self, operations: Sequence[Operation], within: float, done: Done) -> None:
        self.lists.append([operation.words for operation in operations])
        self.answer = lambda: done([[1] * operation.replies for operation in operations])


async def test_leases_that_end_behind_their_renewal_are_freed_behind_it() -> None:
    """Those of one key go together, but not past what would bring one back for half a minute."""
    link = _Slow()
    channel = RedisChannel(link, _Owner(), PATIENT, "{k}:probe")
    rule = LeaseRule("{k}", Scope.USER, 9)
    taken = channel.ask(Operation(["{k}"], ["acquire"], 2, ["0"], (rule,)))
    await until(lambda: len(link.lists) == 1)
    for lease in ("1", "2"):
        channel.drop("{k}", lease, rule)
    renewed = channel.ask(Operation(["{k}"], ["hold", "{k}", 9, 2, "3", "4"], 1))
    for lease in ("3", "4"):
        channel.drop("{k}", lease, rule)
    link.answer()
    link.answer()
    assert (await taken, await renewed) == ([1, 1], [1])
    channel.drop("{k}", "0", rule)
    await until(lambda: len(link.lists) == 3)
    assert link.lists[1:] == [
        [
            ["drop", "{k}", 2, "1", "2"],
            ["hold", "{k}", 9, 2, "3", "4"],
            ["drop", "{k}", 2, "3", "4"],
        ],
        [["drop", "{k}", 1, "0"]],
    ]


async def test_a_list_that_cannot_be_written_leaves_nobody_waiting(server: RedisServer) -> None:
    channel = RedisChannel(RedisLink(server.url), _Owner(), PATIENT, "{k}:probe")
    await channel.start()
    with pytest.raises(channels.RedisFault):
        await channel.ask(Operation(["{k}"], [object()], 1))
    await until(lambda: not channel.degraded)
    await channel.aclose()


async def test_a_fault_in_the_moment_of_recovery_is_repaired_too() -> None:
    """Else limits would be decided without Redis from then on, for ever."""
    link, owner = _Link(), _Owner()
    channel = owner.channel = RedisChannel(link, owner, PATIENT, "{k}:probe")
    with pytest.raises(channels.RedisFault):
        await channel.ask(Operation(["{k}"], ["first"], 1))
    assert channel.degraded
    await until(lambda: link.ran >= 3 and not channel.degraded)
    assert await channel.ask(Operation(["{k}"], ["last"], 1)) == [1]
    assert channel.faults == 2


@pytest.mark.parametrize(
    "plant", ["SET {} x", "LPUSH {} x", "SET {} '1 2'", "SET {} '99999999999999999999 0 0'"]
)
async def test_what_others_wrote_in_the_place_of_limits_harms_nobody(server: RedisServer, plant: str) -> None:
    charges = of("ann", qps=0.01, burst=2, concurrency=2, tokens_per_minute=600)
    async with limiting(server.url) as limiter:
        held = await limiter.acquire(charges, 10)
        assert isinstance(held, Granted)
        with server.client() as client:
            for kind in ("requests", "tokens", "concurrency"):
                client.delete(key("ann", kind))
                client.execute_command(*_words(plant.format(key("ann", kind))))
        held.settle(5)
        held.release()
        for allowed in (True, True, False):
            answer = await limiter.acquire(charges, 10)
            assert isinstance(answer, Granted if allowed else Refused)
        with server.client() as client:
            client.delete("pagefleet:{gateways}")
            client.set("pagefleet:{gateways}", "x")
        await limiter.renew()
        assert limiter.state.gateways == 1
        assert limiter.state.faults == 0


def _words(line: str) -> list[str]:
    command, name, value = line.split(" ", 2)
    return [command, name, value.strip("'")]


async def test_leases_of_a_clock_that_was_ahead_block_nobody(server: RedisServer) -> None:
    """Those of a gateway that was killed before the clock went back would for as long as it was ahead."""
    async with limiting(server.url) as limiter:
        charges = of("ann", concurrency=1)
        with server.client() as client:
            client.zadd(key("ann", "concurrency"), {"dead.1": (time.time() + 86400) * 1e6})
        held = await limiter.acquire(charges)
        assert isinstance(held, Granted)
        assert isinstance(await limiter.acquire(charges), Refused)


class Clock:
    """What the script takes for the server's time, in seconds."""

    script = SCRIPT.replace("redis.call('TIME')", "{redis.call('GET', 'clock'), 0}")

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.set(1_800_000_000)

    def set(self, now: int) -> None:
        self.now = now
        with self._server.client() as client:
            client.set("clock", now)


@pytest.mark.parametrize("jump", [-3600, -90, -20, 3600])
async def test_a_clock_that_jumps_locks_nobody_out(server: RedisServer, jump: int) -> None:
    """Also users whose burst takes an hour to come back wait no longer than they would have."""
    clock = Clock(server)
    limits: list[dict[str, Any]] = [
        {"qps": 1, "burst": 10},
        {"qps": 0.01, "burst": 36},
        {"tokens_per_minute": 600},
    ]
    async with limiting(server.url, script=clock.script) as limiter:
        for number, bounds in enumerate(limits):
            charges = of(f"u{number}", **bounds)
            while isinstance(await limiter.acquire(charges, 60), Granted):
                pass
            before = await limiter.acquire(charges, 60)
            assert isinstance(before, Refused)
            clock.set(clock.now + jump)
            after = await limiter.acquire(charges, 60)
            assert before.retry_after is not None
            if jump > 0:
                assert isinstance(after, Granted)
                continue
            assert isinstance(after, Refused)
            assert after.retry_after == before.retry_after
            clock.set(
                clock.now + math.ceil(before.retry_after)
            )  # and that time goes by, though it is refused
            assert isinstance(await limiter.acquire(charges, 60), Granted)


@pytest.mark.parametrize("jump", [-3600, -20, 3600])
async def test_slots_are_right_again_after_a_jump_of_the_clock(server: RedisServer, jump: int) -> None:
    clock = Clock(server)
    async with limiting(server.url, script=clock.script) as limiter:
        charges = of("ann", concurrency=2)
        held = [await limiter.acquire(charges) for _ in range(2)]
        clock.set(clock.now + jump)
        await limiter.renew()
        assert isinstance(await limiter.acquire(charges), Refused)
        assert limiter.state.gateways == 1
        for one in held:
            assert isinstance(one, Granted)
            one.release()
        assert isinstance(await limiter.acquire(charges), Granted)


async def test_faults_that_only_commands_see_are_seen_by_the_probe_too(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A probe that passes where commands fail would make it come and go, with a line in the log each time."""
    async with limiting(server.url) as limiter:
        charges = of("ann", qps=1000)

        async def fails(*command: str) -> None:
            with server.client() as client:
                client.execute_command(*command)
            while not limiter.degraded:
                await limiter.acquire(charges)
            for _ in range(60):
                await asyncio.sleep(0.005)
                await limiter.acquire(charges)
            assert limiter.degraded

        async def recovers(*command: str) -> None:
            with server.client() as client:
                client.execute_command(*command)
            await until(lambda: not limiter.degraded)

        await fails("ACL", "SETUSER", "default", "-eval", "-evalsha")
        await recovers("ACL", "SETUSER", "default", "+@all")
        await fails("CONFIG", "SET", "maxmemory", "1")
        await recovers("CONFIG", "SET", "maxmemory", "0")
        faults = limiter.state.faults
    assert faults <= 6
    assert len(caplog.records) <= 2 * faults


async def test_a_new_password_is_one_fault_and_the_old_one_makes_it_well(server: RedisServer) -> None:
    async with limiting(server.url) as limiter:
        with server.client() as client:
            client.config_set("requirepass", "new")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        while not limiter.degraded:
            await limiter.acquire(of("ann", qps=1000))
        await until(lambda: "NOAUTH" in str(limiter.state.reason))
        await asyncio.sleep(0.3)
        assert limiter.degraded
        with server.client(password="new") as client:
            client.config_set("requirepass", "")
        await until(lambda: not limiter.degraded)


async def test_an_address_that_means_another_server_by_now(server: RedisServer, tmp_path: Path) -> None:
    """As names do after a failover: the connection to the old master, a replica now, would do for ever."""
    place = tmp_path / "redis.sock"
    place.symlink_to(server.socket)
    with running(tmp_path / "new") as new:
        async with limiting(f"unix://{place}") as limiter:
            charges = of("ann", qps=0.01, burst=2)
            assert isinstance(await limiter.acquire(charges), Granted)
            with server.client() as client:
                client.replicaof("127.0.0.1", 1)
            place.unlink()
            place.symlink_to(new.socket)
            while not limiter.degraded:
                await limiter.acquire(of("bob", qps=1000))
            await until(lambda: not limiter.degraded)
            answers = [await limiter.acquire(charges) for _ in range(3)]
            assert [type(answer) for answer in answers] == [Granted, Granted, Refused]


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
        channel = RedisChannel(link, _Owner(), 0.03, "{k}:probe")
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


async def test_limits_that_cannot_be_are_left_where_they_are(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """In Redis, where anybody who may write can put them, as in the file: a gateway goes on without."""
    shared = RedisOverrides(server.url, within=60)
    good = Entry(7, Bounds(qps=1))
    bad = {
        "default": b'{"at":9,"bounds":{"concurrency":0}}',
        "user:bob": b'{"at":9,"bounds":{"qps":-1}}',
        "user:cid": b'{"at":9,"bounds":{"tokens_per_minute":1e300}}',
        "user:dan": b"no JSON",
        "user:eve": b"5",
    }
    with server.client() as client:
        client.hset("pagefleet:{limits}:set", mapping={**bad, "user:ann": msgspec.json.encode(good)})
        client.set("pagefleet:{limits}:number", "1")
    assert await shared.exchange({}, changed=True) == {"user:ann": good}
    mine = {name: Entry(10, Bounds(qps=2)) for name in ("default", "user:dan", "user:eve")}
    await shared.exchange(mine, changed=True)
    with server.client() as client:
        assert {
            name: msgspec.json.decode(client.hget("pagefleet:{limits}:set", name), type=Entry)
            for name in mine
        } == mine
        client.delete("pagefleet:{limits}:set")
        client.set("pagefleet:{limits}:set", "x")
    with pytest.raises(OverridesUnusable, match=r"can't be had from Redis at .*WRONGTYPE"):
        await shared.exchange(mine, changed=True)
    await shared.aclose()


def test_a_file_of_limits_that_cannot_be_is_refused_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    for bounds in ('{"concurrency":0}', '{"qps":0}', '{"qps":1e308,"burst":1}', '{"qps":1e-300}'):
        file.write_text(f'{{"default":{{"at":9,"bounds":{bounds}}}}}')
        with pytest.raises(OverridesUnusable, match=r"limits\.json can't be read"):
            OverridesFile(file).read()
