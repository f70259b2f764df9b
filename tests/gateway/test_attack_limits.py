"""Limits that change between and under bursts, over processes that count in a real Redis: exact from the
return of the command on."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from tests.gateway.redis_server import running
from tests.gateway.rig import until
from tests.gateway.test_limits_processes import Gateways, at_once, becomes, gateways, limits, made

pytestmark = pytest.mark.redis
SCARCE = {"qps": 0.001, "burst": 10}  # nothing comes back within a test


async def change(fleet: Gateways, *arguments: str) -> None:
    """A command, and the moment after it."""
    words = ["limits", *arguments, "--state-dir", str(fleet.rig.folder)]
    result = await asyncio.to_thread(CliRunner().invoke, pagefleet, words)
    assert result.exit_code == 0, result.output


async def burst(fleet: Gateways, count: int) -> Counter[bytes]:
    """Statuses of so many requests at once, a third to each process."""
    answers = await asyncio.gather(*(at_once(fleet.clients[i % 3]) for i in range(count)))
    return Counter(answer.split()[1] for answer in answers)


async def test_a_changed_limit_is_exact_from_the_return_of_the_command_on(tmp_path: Path) -> None:
    """On every process, at once: none that is late refuses what the new limit lets pass, nor lets pass more.
    What was used counts on, up to a whole burst of the new limit."""
    with running(tmp_path / "redis") as server:
        async with gateways(made(tmp_path), 3, **limits(SCARCE, server.url)) as fleet:
            assert await burst(fleet, 60) == {b"200": 10, b"429": 50}
            await change(fleet, "set", "user", "ann", "--qps", "0.001", "--burst", "25")
            assert await burst(fleet, 15) == {b"200": 15}
            assert await burst(fleet, 15) == {b"429": 15}
            await change(fleet, "set", "user", "ann", "--qps", "0.001", "--burst", "4")
            assert await burst(fleet, 15) == {b"429": 15}
            await change(fleet, "unset", "user", "ann")
            assert await burst(fleet, 30) == {b"429": 30}
            await change(fleet, "set", "user", "ann", "--qps", "none")
            assert await burst(fleet, 30) == {b"200": 30}
            await change(fleet, "set", "user", "ann", "--qps", "1000000", "--burst", "1000000000000")
            assert await burst(fleet, 30) == {b"200": 30}
            await change(fleet, "set", "user", "ann", "--concurrency", str(2**64))
            assert await burst(fleet, 30) == {b"200": 30}
        assert "Traceback" not in fleet.log()


async def test_a_limit_that_changes_under_a_burst_lets_exactly_so_many_pass(tmp_path: Path) -> None:
    """Clients never rest; with each of three higher limits as many more pass as it is higher, and under a
    lower one none that begins after the command."""
    with running(tmp_path / "redis") as server:
        async with gateways(made(tmp_path), 3, **limits(SCARCE, server.url)) as fleet:
            passed: list[float] = []  # when it began
            refused: list[float] = []
            over = False

            async def client(number: int) -> None:
                for turn in itertools.count(number):
                    if over:
                        return
                    began = time.monotonic()
                    status = (await at_once(fleet.clients[turn % 3])).split()[1]
                    assert status in (b"200", b"429")
                    (passed if status == b"200" else refused).append(began)

            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(client(number))
                await until(lambda: len(refused) > 50)
                for most in (30, 45, 70):
                    await change(fleet, "set", "user", "ann", "--qps", "0.001", "--burst", str(most))
                    returned = time.monotonic()
                    await until(lambda at=returned: sum(began > at for began in refused) > 50)
                    assert len(passed) == most
                await change(fleet, "set", "user", "ann", "--qps", "0.001", "--burst", "5")
                returned = time.monotonic()
                await until(lambda at=returned: sum(began > at for began in refused) > 50)
                over = True
            assert len(passed) == 70


@pytest.mark.parametrize(
    "words",
    [
        *(["--qps", bad] for bad in ("0", "-1", "nan", "inf", "1e400", "1000001", "0.0000001", "9" * 5000)),
        *(["--qps", "5", "--burst", bad] for bad in ("0", "-1", "1.5", str(2**64))),
        *(["--concurrency", bad] for bad in ("0", "-1", "1.5", "nan", "9" * 5000)),
        *(["--tokens-per-minute", bad] for bad in ("0", "-1", "1.5", "nan", str(2**64), "9" * 5000)),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_numbers_that_are_no_limit_are_refused_and_change_nothing(tmp_path: Path, words: list[str]) -> None:
    place = ["--state-dir", str(tmp_path)]
    given = ["limits", "set", "user", "ann", *words, *place]
    result = CliRunner().invoke(pagefleet, given)
    assert result.exit_code == 2, result.output
    assert words[-2].removeprefix("--").replace("-", "_") in result.stderr.replace("-", "_")
    assert len(result.stderr) < 500
    assert not (tmp_path / "limits.json").exists()


async def test_whatever_redis_does_in_a_burst_refuses_and_fails_nobody(tmp_path: Path) -> None:
    """It kicks all clients again and again, waits with writes, forgets scripts and keys, has no memory, takes
    no writes, hangs, and starts again, while users stay far below their limits. Then limits hold."""
    generous = {"qps": 100_000, "burst": 100_000, "concurrency": 1000}
    with running(tmp_path / "redis") as server:
        async with gateways(made(tmp_path), 3, **limits(generous, server.url, faults=True)) as fleet:
            statuses: Counter[bytes] = Counter()
            over = False

            async def client(number: int) -> None:
                for turn in itertools.count(number):
                    if over:
                        return
                    statuses[(await at_once(fleet.clients[turn % 3])).split()[1]] += 1

            async def more() -> None:
                seen = statuses.total()
                await until(lambda: statuses.total() > seen + 40)

            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(client(number))
                with server.client() as redis:
                    for _ in range(20):
                        redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                        await more()
                    for command in ("FLUSHALL", "SCRIPT FLUSH", "CLIENT PAUSE 1500 WRITE"):
                        redis.execute_command(command)
                        await more()
                    for setting, bad, good in (("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")):
                        redis.config_set(setting, bad)
                        await more()
                        redis.config_set(setting, good)
                        await becomes(False, *fleet.clients)
                    redis.replicaof("127.0.0.1", 1)
                    await more()
                    redis.replicaof("NO", "ONE")
                server.pause()
                await more()
                server.resume()
                await more()
                server.kill()
                await more()
                server.start()
                await becomes(False, *fleet.clients)
                await more()
                over = True
            assert statuses.keys() == {b"200"}
            await change(fleet, "set", "user", "ann", "--qps", "0.001", "--burst", "10")
            with server.client() as redis:
                redis.flushall()
            assert 0 < (await burst(fleet, 60))[b"200"] <= 10
        assert "Traceback" not in fleet.log()
