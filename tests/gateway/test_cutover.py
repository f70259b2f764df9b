"""Users move from one version to another and back, over real gateway processes: nobody hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from gateway.board import FRESH_SECONDS
from gateway.fleet.observer import Observer
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.gateway_processes import Client, Gateways, gateways
from tests.gateway.rig import Rig, error_of, http_post, target, until

USERS = [f"user{number}" for number in range(50)]


def split(rig: Rig, old: FakeWorker, new: FakeWorker, share: int) -> None:
    """`share` basis points of the users get the new version."""
    rig.route(
        target(old, slot="a", weight_bp=10_000 - share, variant="old"),
        target(new, slot="b", weight_bp=share, variant="new"),
        salt="s",
    )


def observer_of(running: Gateways) -> Observer:
    return Observer({slot: running.state.board(slot) for slot in running.slots})


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections(running: Gateways, least: int) -> AsyncIterator[list[Pair]]:
    """At least so many to each process."""
    held: list[Pair] = []
    try:
        while any(count < least for count in running.connections()):
            held.append(await running.connect())
            await until(lambda: sum(running.connections()) == len(held))
        yield held
    finally:
        for _, writer in held:
            writer.close()


async def served_by(reader: asyncio.StreamReader) -> str:
    """The worker that gave the next answer, which must be a good one."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        answer: dict[str, str] = json.loads(await reader.readuntil(b"}"))
    return answer["served_by"]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


async def answers(pair: Pair, users: Iterable[str]) -> set[str]:
    """Who answered requests of these users."""
    reader, writer = pair
    found = set()
    for user in users:
        writer.write(http_post(body(user=user)))
        found.add(await served_by(reader))
    return found


async def test_all_processes_give_a_user_the_same_version_and_only_move_him_forward(tmp_path: Path) -> None:
    async with gateways(tmp_path) as (running, rig):
        old, new = rig.workers[0], await rig.worker("new")
        observer = observer_of(running)
        before = dict.fromkeys(USERS, "w")
        async with connections(running, 1) as held:
            split(rig, old, new, 500)
            await until(lambda: observer.applied(rig.epoch))
            async with asyncio.timeout(60):  # a process that hasn't asked the new one yet may pass it over
                while not all([await answers(pair, USERS) != {"w"} for pair in held]):
                    await asyncio.sleep(0.1)
            for share in (500, 2500, 5000, 10_000):
                split(rig, old, new, share)
                await until(lambda: observer.applied(rig.epoch))
                found: dict[str, set[str]] = {user: set() for user in USERS}
                for pair in held:
                    for user in USERS:
                        found[user] |= await answers(pair, [user])
                versions = {user: seen.pop() for user, seen in found.items()}
                assert not any(found.values())
                moved = [user for user in USERS if versions[user] == "new"]
                assert len(moved) == pytest.approx(share / 10_000 * len(USERS), abs=12)
                assert all(versions[user] == "new" for user in USERS if before[user] == "new")
                before = versions
        assert set(before.values()) == {"new"}


async def test_weights_flip_a_hundred_times_under_load(tmp_path: Path) -> None:
    """Now and then the barrier is waited for, and must be true: no request is or comes where no weight is.

    There, the worker without weight refuses from the very beginning on, as one that drains too early.
    """
    rng = random.Random(1)
    async with gateways(tmp_path) as (running, rig):
        old, new = rig.workers[0], await rig.worker("new")
        split(rig, old, new, 0)
        observer = observer_of(running)
        done = asyncio.Event()
        bodies = [body(user=f"u{number}", fake={"wait": 0.002 * (number % 4)}) for number in range(16)]
        clients = [Client(running, one) for one in bodies]
        await until(lambda: observer.applied(rig.epoch))
        reader, writer = await running.connect()
        writer.write(http_post(body(stream=True, fake={"do": "sse", "gate_at": 3})))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        tasks = [asyncio.create_task(client.run(done.is_set)) for client in clients]
        await until(lambda: all(client.answers > 3 for client in clients))
        for flip in range(1, 101):
            loser, slot, streams = (old, "a.1", 1) if flip % 2 else (new, "b.1", 0)
            old.draining = new.draining = False
            split(rig, old, new, 10_000 * (flip % 2))
            if flip % 10 > 1:
                await asyncio.sleep(rng.random() * 0.04)
                continue
            loser.draining = True
            await until(
                lambda: observer.applied(rig.epoch) and observer.inflight("m", [slot]) <= streams,  # noqa: B023
            )
            seen = len(loser.requests)
            assert (observer.inflight("m", [slot]), loser.busy) == (streams, streams)
            winners = [client.answers for client in clients]
            await until(lambda w=winners: all(c.answers > one for c, one in zip(clients, w)))  # type: ignore[misc]
            assert len(loser.requests) == seen
        done.set()
        await asyncio.gather(*tasks)
        assert [client.failures for client in clients] == [[]] * 16
        old.gate.set()  # the stream that began before all this ends as if nothing had been
        assert (await reader.read(100_000)).count(b"data: ") >= 1
        await until(lambda: observer.inflight("m", ["a.1", "b.1"]) == 0)
        writer.close()
        answers = sum(client.answers for client in clients)
        await until(lambda: observer.window("m", ["a.1", "b.1"]).requests == answers + 1)
        assert observer.window("m", ["a.1", "b.1"]).errors == 0
        assert observer.window("m", ["b.1"]).requests > 100


# A gateway that reads the routes only when it has to: else its usual look at them, which is due when it is
# continued, most often comes before the first request that waits.
NO_POLL = "import gateway.routing as r; r.POLL_EVERY = 1e6; from gateway.__main__ import main; main()"


async def test_a_paused_gateway_cannot_use_an_old_route(tmp_path: Path) -> None:
    """What it was asked while it was paused goes to the new worker, as nobody has waited for it."""
    async with gateways(tmp_path, programs={"gateway1": ("-c", NO_POLL)}) as (running, rig):
        old, new = rig.workers[0], await rig.worker("new")
        observer = observer_of(running)
        paused = running.children["gateway1"]
        async with connections(running, 4) as held:
            before = running.connections()
            paused.send_signal(signal.SIGSTOP)
            since = time.monotonic()
            for _, writer in held:
                writer.write(http_post(body()))
            await until(lambda: len(old.requests) == len(held) - before[1])
            rig.route(target(new, slot="b"))
            await until(lambda: observer.applied(rig.epoch) and not observer.inflight("m", ["s.1"]))
            assert time.monotonic() - since > FRESH_SECONDS / 2  # it was waited for as long as it lived
            assert "gateway1" not in observer.living()
            seen = len(old.requests)
            await asyncio.sleep(FRESH_SECONDS / 10)
            paused.send_signal(signal.SIGCONT)
            answers = [await served_by(reader) for reader, _ in held]
            assert answers.count("new") == before[1]
            assert len(old.requests) == seen
            await until(lambda: len(observer.living()) == 3 and observer.applied(rig.epoch))


async def test_a_version_whose_replicas_all_drain_is_passed_over(tmp_path: Path) -> None:
    """More of them than a request that fails is tried on."""
    rig = Rig(tmp_path)
    workers = [await rig.worker(f"old{number}") for number in range(7)]
    new = await rig.worker("new")
    olds = [target(worker, slot=worker.name, weight_bp=1400, variant="old") for worker in workers]
    rig.route(*olds, target(new, slot="new", weight_bp=200, variant="new"), salt="s")
    async with rig.running():
        for worker in workers:
            worker.draining = True
        for user in USERS[:10]:
            response = await rig.post({"model": "m", "user": user})
            assert (response.status_code, response.json()["served_by"]) == (200, "new")
        assert sum(len(worker.requests) for worker in workers) >= 7 * 5
        new.draining = True
        response = await rig.post()
        assert (response.status_code, error_of(response)["code"]) == (503, "model_unavailable")
        for worker in workers:
            worker.draining, worker.full = False, True
        new.draining = False
        before = sum(len(worker.requests) for worker in workers)
        await rig.post({"model": "m", "user": USERS[0]})
        assert sum(len(worker.requests) for worker in workers) <= before + 4
        assert rig.inflight() == 0
