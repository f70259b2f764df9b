"""Limits set while the fleet runs: the file, Redis between gateways, and what wins."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.limits.bounds import NOTHING, Bounds
from gateway.limits.live import LiveOverrides
from gateway.limits.overrides import FILE, Entry, OverridesFile, OverridesUnusable, merged, newer
from gateway.limits.redis_overrides import RedisOverrides
from tests.gateway.redis_server import running
from tests.gateway.rig import until

HASH = "pagefleet:{limits}:set"


def test_the_file_keeps_what_is_set(tmp_path: Path) -> None:
    file = OverridesFile(tmp_path / FILE)
    assert file.read() == {}
    file.put("user:ann", Bounds(qps=5, burst=None))
    other = OverridesFile(tmp_path / FILE)
    other.read()
    assert not other.changed()
    file.put("default", Bounds(concurrency=3))
    assert other.changed()
    assert {name: entry.bounds for name, entry in other.read().items()} == {
        "user:ann": Bounds(qps=5, burst=None),
        "default": Bounds(concurrency=3),
    }
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    stored = json.loads((tmp_path / FILE).read_text())["user:ann"]
    assert stored["bounds"] == {"qps": 5, "burst": None}


def test_a_clock_that_went_back_doesnt_undo_a_change(tmp_path: Path) -> None:
    file = OverridesFile(tmp_path / FILE)
    file.merge({"user:ann": Entry(2**60, Bounds(qps=1))})
    assert file.put("user:ann", Bounds(qps=2))["user:ann"] == Entry(2**60 + 1, Bounds(qps=2))


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for step in range(5):
            OverridesFile(tmp_path / FILE).put(f"user:{number}.{step}", Bounds(qps=1))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(OverridesFile(tmp_path / FILE).read()) == 40


def test_what_cant_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"user:ann": 7}')
    with pytest.raises(OverridesUnusable, match=r"limits\.json can't be read"):
        OverridesFile(tmp_path / FILE).read()
    with pytest.raises(OverridesUnusable, match="can't be written"):
        OverridesFile(tmp_path / "no" / "where" / FILE).put("default", NOTHING)


def test_merging_goes_in_any_order() -> None:
    """Also for entries set at the very same time."""
    rng = random.Random(4)
    maps: list[dict[str, Entry]] = [
        {
            f"user:{rng.randrange(4)}": Entry(rng.randrange(3), Bounds(qps=rng.randrange(1, 5)))
            for _ in range(4)
        }
        for _ in range(6)
    ]
    results = []
    for _ in range(20):
        rng.shuffle(maps)
        result: dict[str, Entry] = {}
        for one in maps:
            assert merged(result, one) == {**result, **newer(one, result)}
            result = merged(result, one)
        results.append(result)
    assert all(result == results[0] for result in results)


class Gateway:
    """What one gateway applies, with its own state directory."""

    def __init__(self, folder: Path, url: str | None) -> None:
        folder.mkdir()
        self.file = folder / FILE
        self.applied: dict[str, Bounds] = {}
        shared = RedisOverrides(url) if url else None
        self.live = LiveOverrides(OverridesFile(self.file), shared, self._apply)

    def _apply(self, entries: Any) -> None:
        self.applied = {name: entry.bounds for name, entry in entries.items() if entry.bounds}

    def set(self, name: str, bounds: Bounds) -> None:
        """As the command line does, from another process."""
        OverridesFile(self.file).put(name, bounds)


async def test_a_running_gateway_follows_the_file(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "a", None)
    gateway.live.start()
    gateway.set("user:ann", Bounds(qps=5))
    await until(lambda: gateway.applied == {"user:ann": Bounds(qps=5)})
    gateway.file.write_text("nonsense")
    await asyncio.sleep(0.5)
    assert gateway.applied == {"user:ann": Bounds(qps=5)}  # what was known holds
    gateway.file.unlink()
    gateway.set("user:ann", NOTHING)
    await until(lambda: gateway.applied == {})
    await gateway.live.aclose()


@pytest.mark.redis
async def test_gateways_of_several_machines_agree_through_redis(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as server:
        one, two = Gateway(tmp_path / "a", server.url), Gateway(tmp_path / "b", server.url)
        one.set("user:before", Bounds(qps=1))  # while no gateway runs
        for gateway in (one, two):
            gateway.live.start()
        await until(lambda: two.applied == {"user:before": Bounds(qps=1)})
        two.set("user:before", NOTHING)
        one.set("model:m", Bounds(concurrency=2))
        expected = {"model:m": Bounds(concurrency=2)}
        await until(lambda: one.applied == two.applied == expected)

        # A Redis that comes back empty gets everything again, and a new machine gets it from there.
        with server.client() as client:
            client.flushall()
        await until(lambda: server.client().hlen(HASH) == 2)
        three = Gateway(tmp_path / "c", server.url)
        three.live.start()
        await until(lambda: three.applied == expected)
        await until(lambda: OverridesFile(three.file).read() == OverridesFile(one.file).read())

        # While Redis is away the file goes on, and is passed on afterwards.
        server.kill()
        one.set("user:ann", Bounds(qps=3))
        await until(lambda: "user:ann" in one.applied)
        assert "user:ann" not in two.applied
        server.start()
        await until(lambda: "user:ann" in two.applied and "user:ann" in three.applied)
        for gateway in (one, two, three):
            await gateway.live.aclose()


@pytest.mark.redis
async def test_entries_of_another_version_are_left_alone(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as server:
        with server.client() as client:
            client.hset(HASH, "user:x", '{"at": 5, "bounds": {"dollars": 3}}')
            client.hset(HASH, "user:y", '{"at": 5, "bounds": {"qps": 3}}')
        shared = RedisOverrides(server.url, within=60)
        assert await shared.exchange({}, changed=True) == {"user:y": Entry(5, Bounds(qps=3))}
        await shared.aclose()
        with server.client() as client:
            assert client.hlen(HASH) == 2


@pytest.mark.redis
async def test_what_was_taken_away_long_ago_is_forgotten_everywhere(tmp_path: Path) -> None:
    """In the file and in Redis: else both would keep every key that ever had limits."""
    stale, fresh = Entry(1), Entry(time.time_ns() // 1000)
    file = OverridesFile(tmp_path / FILE)
    file.merge({"key:old": stale, "key:new": fresh, "user:ann": Entry(1, Bounds(qps=1))})
    assert file.read().keys() == {"key:new", "user:ann"}
    with running(tmp_path / "redis") as server:
        everything = {"key:old": stale, "key:new": fresh}
        with server.client() as client:
            client.hset(
                HASH, mapping={name: msgspec.json.encode(entry) for name, entry in everything.items()}
            )
            client.set("pagefleet:{limits}:number", "1")
        shared = RedisOverrides(server.url, within=60)
        assert await shared.exchange({"key:older": stale}, changed=True) == {"key:new": fresh}
        with server.client() as client:
            assert client.hkeys(HASH) == [b"key:new"]
            # A user of Redis that may not take fields away is not kept from sharing limits.
            client.hset(HASH, "key:old", msgspec.json.encode(stale))
            client.execute_command("ACL", "SETUSER", "default", "-hdel")
        assert await shared.exchange({}, changed=True) == {"key:new": fresh}
        await shared.aclose()
