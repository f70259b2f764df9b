"""Several gateway processes on one port: balance, one truth, and what one costs the others when it goes."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway import client_protocol
from gateway.cli import main as pagefleet
from tests.gateway.gateway_processes import BODY, PROCESSES, Client, Gateways, gateways
from tests.gateway.rig import http_post, target, until


async def evenly(running: Gateways, at_once: bool) -> bool:
    """Whether each process has its part of sixty connections."""
    if at_once:
        held = await asyncio.gather(*(running.connect() for _ in range(60)))
    else:
        held = [await running.connect() for _ in range(60)]
    await until(lambda: sum(running.connections()) == 60)
    found = running.connections()
    for _, writer in held:
        writer.close()
    await until(lambda: sum(running.connections()) == 0)
    return all(16 <= count <= 24 for count in found)


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_connections_are_shared_evenly(tmp_path: Path, unix: bool) -> None:
    """A process that isn't run for a while gets less then, so more than one try is allowed. Left to itself
    the kernel never comes near."""
    async with gateways(tmp_path, unix=unix) as (running, _):
        for at_once in (True, False):
            assert any([await evenly(running, at_once) for _ in range(5)])
        # Who is paused gets no more, and nobody waits for it.
        running.children["gateway1"].send_signal(signal.SIGSTOP)
        before = running.connections()[1]
        for _ in range(20):
            assert (await running.get("/health"))[0] == 200
        assert running.connections()[1] == before
        running.children["gateway1"].send_signal(signal.SIGCONT)


async def test_two_hundred_calls_one_answer(tmp_path: Path) -> None:
    """Also at once after the routes have changed."""
    async with gateways(tmp_path) as (running, rig):
        for change in range(2):
            if change:
                other = target(await rig.worker("w2"), slot="t", generation=3)
                rig.route(other, model="m")
            async with running.everyone() as clients:
                for path in ("/ready", "/v1/models"):
                    answers, processes = Counter[tuple[int, bytes]](), set()
                    for number in range(200):
                        status, process, body = await clients[number % len(clients)](path)
                        answers[status, body] += 1
                        processes.add(process)
                    assert list(answers.values()) == [200], answers
                    assert len(processes) == PROCESSES


async def test_keys_are_those_of_all(tmp_path: Path) -> None:
    def keys(*arguments: str) -> str:
        result = CliRunner().invoke(pagefleet, ["keys", *arguments, "--state-dir", str(tmp_path)])
        assert result.exit_code == 0, result.stderr
        return result.stdout.strip()

    async with gateways(tmp_path, auth="keys") as (running, _):
        key = keys("create", "--user", "alice")
        for change, status in (((), 200), (("revoke", key), 401)):
            if change:
                keys(*change)
            answers, processes = Counter[int](), set()
            async with running.everyone() as clients:
                bearer = f"authorization: Bearer {key}\r\n"
                async with asyncio.timeout(60):
                    while {(await ask("/v1/models", bearer))[0] for ask in clients} != {status}:
                        await asyncio.sleep(0.01)
                for ask in clients * 10:
                    got, process, _ = await ask("/v1/models", bearer)
                    answers[got] += 1
                    processes.add(process)
            assert set(answers) == {status}
            assert len(processes) == PROCESSES


async def test_metrics_add_up_and_survive_a_kill(tmp_path: Path) -> None:
    key = "pagefleet_gateway_requests_total,m,200,s.1"
    async with gateways(tmp_path) as (running, rig):
        clients = [Client(running) for _ in range(6)]
        await asyncio.gather(*(c.run(lambda c=c: c.answers == 20) for c in clients))  # type: ignore[misc]
        counts = {key: 120.0, "pagefleet_gateway_request_seconds_count,m": 120.0}
        await running.until_metrics(
            {
                **counts,
                "pagefleet_gateway_request_seconds_bucket,+Inf,m": 120,
                "pagefleet_gateway_processes": PROCESSES,
                "pagefleet_route_epoch": rig.epoch,
                "pagefleet_route_epoch_max": rig.epoch,
            }
        )
        await until(lambda: sum(running.connections()) == 0)
        hanging = json.dumps({"model": "m", "fake": {"do": "hang"}}).encode()
        held = []
        while min(running.connections()) < 2:
            held.append(await running.connect())
            held[-1][1].write(http_post(hanging))
            await until(lambda: len(rig.workers[0].requests) == 120 + len(held))
        part = running.connections()[0]
        await running.until_metrics({**counts, "pagefleet_gateway_inflight,m,s.1": len(held)})
        running.kill("gateway0")
        await running.until_metrics(
            {
                **counts,
                "pagefleet_gateway_processes": PROCESSES - 1,
                "pagefleet_gateway_inflight,m,s.1": len(held) - part,  # its part is gone
            }
        )
        await running.start("gateway0")
        again = [Client(running) for _ in range(6)]
        await asyncio.gather(*(c.run(lambda c=c: c.answers == 10) for c in again))  # type: ignore[misc]
        await running.until_metrics({key: 180, "pagefleet_gateway_processes": PROCESSES})
        for _, writer in held:
            writer.close()


async def test_a_kill_under_load_costs_only_what_it_carried(tmp_path: Path) -> None:
    async with gateways(tmp_path) as (running, _):
        done = asyncio.Event()
        clients = [Client(running) for _ in range(12)]
        tasks = [asyncio.create_task(client.run(done.is_set)) for client in clients]
        await until(lambda: all(client.answers > 10 for client in clients))
        await until(lambda: sum(running.connections()) == 12)
        part = max(running.connections())
        victim = running.slots[running.connections().index(part)]
        running.kill(victim)
        marks = [client.answers for client in clients]
        await until(lambda: all(c.answers > mark + 20 for c, mark in zip(clients, marks)))
        await running.start(victim)
        marks = [client.answers for client in clients]
        await until(lambda: all(c.answers > mark + 10 for c, mark in zip(clients, marks)))
        done.set()
        await asyncio.gather(*tasks)
        hit = [client for client in clients if client.failures]
        assert all(len(client.failures) == 1 for client in hit)  # its connection's end, and never another
        assert 1 <= len(hit) <= part
        served = sum(client.answers for client in clients)

        async def counted() -> float:
            page = await running.metrics()
            return sum(value for name, value in page.items() if re.match(r".*requests_total,m,200,", name))

        # A request is counted right after its answer: a kill comes between, or before the client has read it.
        async with asyncio.timeout(60):
            while abs(await counted() - served) > part:
                await asyncio.sleep(0.05)


async def test_an_orderly_end_resets_nobody(tmp_path: Path) -> None:
    """One process after the other is told to end, under load, and one takes its place."""
    async with gateways(tmp_path) as (running, _):
        done = asyncio.Event()
        clients = [Client(running) for _ in range(16)]
        tasks = [asyncio.create_task(client.run(done.is_set)) for client in clients]
        for slot in running.slots[:2]:
            marks = [client.answers for client in clients]
            await until(lambda m=marks: all(c.answers > mark + 10 for c, mark in zip(clients, m)))  # type: ignore[misc]
            running.children[slot].terminate()
            assert await running.ended(slot) == 0
            await running.start(slot)
        done.set()
        await asyncio.gather(*tasks)
        assert [client.failures for client in clients] == [[]] * 16
        assert sum(client.connections for client in clients) > 16


async def test_idle_connections_have_a_last_call(tmp_path: Path) -> None:
    async with gateways(tmp_path) as (running, _):
        for _ in range(5):
            held = [await running.connect() for _ in range(6)]
            for reader, writer in held:
                writer.write(http_post(BODY))
                await reader.readuntil(b'{"served_by":"w"}')
            told = time.monotonic()
            for child in running.children.values():
                child.terminate()
            await until(running.leaving)
            for _, writer in held[:3]:
                writer.write(http_post(BODY))
            in_time = time.monotonic() < told + client_protocol.LAST_CALL_SECONDS / 2
            answers = await asyncio.gather(*(reader.read() for reader, _ in held), return_exceptions=True)
            for _, writer in held:
                writer.close()
            assert [await running.ended(slot) for slot in running.slots] == [0] * PROCESSES
            if in_time:  # else this machine was too busy to ask within the last call
                break
            await running.start(*running.slots)
        for answer in answers[:3]:
            assert isinstance(answer, bytes)
            assert answer.endswith(b'{"served_by":"w"}')
            assert b"connection: close" in answer
        assert answers[3:] == [b""] * 3  # an end, not a reset


async def test_streams_are_finished_by_a_process_that_ends(tmp_path: Path) -> None:
    async with gateways(tmp_path) as (running, rig):
        stream = {"model": "m", "fake": {"do": "sse", "chunks": 30, "delay": 0.1}}
        held = [await running.connect() for _ in range(6)]
        for _, writer in held:
            writer.write(http_post(json.dumps(stream).encode()))
        await until(lambda: len(rig.workers[0].requests) == 6)
        for child in running.children.values():
            child.terminate()
        for reader, writer in held:
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.close()
        assert [await running.ended(slot) for slot in running.slots] == [0] * PROCESSES


async def test_what_waits_in_the_queue_is_another_processes(tmp_path: Path) -> None:
    """Connections that nobody has taken yet when a process ends or dies aren't lost."""
    async with gateways(tmp_path) as (running, _):
        for slot in running.slots:
            running.children[slot].send_signal(signal.SIGSTOP)
        waiting = [asyncio.create_task(running.get("/health")) for _ in range(30)]
        await asyncio.sleep(0.2)
        running.kill("gateway0")
        running.children["gateway1"].terminate()
        for slot in ("gateway1", "gateway2"):
            running.children[slot].send_signal(signal.SIGCONT)
        assert {status for status, *_ in await asyncio.gather(*waiting)} == {200}


async def test_one_without_a_descriptor_to_spare_leaves_connections_to_the_others(tmp_path: Path) -> None:
    async with gateways(tmp_path) as (running, _):
        child = running.children["gateway0"]
        _, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (8, hard))  # fewer than it has
        held = [await running.connect() for _ in range(30)]
        for reader, writer in held:
            writer.write(http_post(BODY))
            await reader.readuntil(b'{"served_by":"w"}')
        await until(lambda: sum(running.connections()) == 30)
        assert running.connections()[0] == 0
        log = tmp_path / "gateway0.log"
        assert log.read_text().count("no connection can be taken: Too many open files") == 1
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (hard, hard))
        async with asyncio.timeout(60):
            while running.connections()[0] < 5:  # the others, which have 15 each, leave it to this one
                held.append(await running.connect())
                await asyncio.sleep(0.05)
        for _, writer in held:
            writer.close()
