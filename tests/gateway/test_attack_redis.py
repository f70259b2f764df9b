"""Attacks on limits by way of Redis: what others write there, rights taken away, limits that can't be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.limits import Granted, Refused
from gateway.limits import redis_channel as channels
from gateway.limits.bounds import Bounds
from gateway.limits.overrides import Entry, OverridesFile, OverridesUnusable
from gateway.limits.redis_channel import RedisChannel
from gateway.limits.redis_link import Done, Operation, RedisLink
from gateway.limits.redis_overrides import RedisOverrides
from gateway.limits.rules import LeaseRule, Scope
from tests.gateway.redis_limits import PATIENT, Owner, key, limiting, of
from tests.gateway.redis_server import RedisServer, running
from tests.gateway.rig import until

pytestmark = pytest.mark.redis


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
    channel = RedisChannel(link, Owner(), PATIENT, "{k}:probe")
    rule = LeaseRule("{k}", Scope.USER, 9, 9)
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
    channel = RedisChannel(RedisLink(server.url), Owner(), PATIENT, "{k}:probe")
    await channel.start()
    with pytest.raises(channels.RedisFault):
        await channel.ask(Operation(["{k}"], [object()], 1))
    await until(lambda: not channel.degraded)
    await channel.aclose()


async def test_a_fault_in_the_moment_of_recovery_is_repaired_too() -> None:
    """Else limits would be decided without Redis from then on, for ever."""
    link, owner = _Link(), Owner()
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
