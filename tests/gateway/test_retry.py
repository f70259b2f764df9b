from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.connection import Connection
from tests.gateway.rig import Rig, error_of, http_post, one_worker, target, until


async def two_workers(rig: Rig, **kinds: Any) -> None:
    workers = [await rig.worker(name, **kinds) for name in "ab"]
    rig.route(*(target(worker, slot=worker.name) for worker in workers))


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_draining_worker_is_passed_over(tmp_path: Path, tcp: bool) -> None:
    rig = Rig(tmp_path)
    await two_workers(rig, tcp=tcp)
    async with rig.running():
        rig.workers[0].draining = True
        answers = [await rig.post() for _ in range(10)]
        assert [(answer.status_code, answer.json()["served_by"]) for answer in answers] == [(200, "b")] * 10
        assert {answer.headers["x-pagefleet-target"] for answer in answers} == {"b.1"}
        assert rig.workers[0].requests
        assert rig.inflight() == 0


async def test_draining_and_nowhere_else_is_503(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        rig.workers[0].draining = True
        response = await rig.post()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "model_unavailable"
        assert len(rig.workers[0].requests) == 1


async def test_a_refusal_makes_the_routes_be_read_at_once(tmp_path: Path) -> None:
    """The supervisor publishes the new target before it drains the old one: nobody may see an error."""
    async with one_worker(tmp_path) as rig:
        old, new = rig.workers[0], await rig.worker("new")
        for generation in range(2, 8):
            rig.route(target(new, generation=generation))
            old.draining = True
            response = await rig.post()
            assert (response.status_code, response.json()["served_by"]) == (200, "new")
            rig.route(target(old))
            rig.app.router.refresh()


async def test_the_same_slot_in_a_new_generation_may_be_tried(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        await rig.workers[0].stop()
        again = await rig.worker("again")
        rig.route(target(again, generation=2))
        response = await rig.post()
        assert response.json()["served_by"] == "again"
        assert response.headers["x-pagefleet-target"] == "s.2"


@pytest.mark.parametrize("tcp", [False, True])
async def test_connection_refused_is_passed_over(tmp_path: Path, tcp: bool) -> None:
    rig = Rig(tmp_path)
    await two_workers(rig, tcp=tcp)
    async with rig.running():
        await rig.workers[0].stop()
        for _ in range(6):
            assert (await rig.post()).json()["served_by"] == "b"


async def test_connection_refused_everywhere_is_503(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target("http://127.0.0.1:1", slot="a"), target(f"unix:{tmp_path}/none", slot="b"))
    async with rig.running():
        response = await rig.post()
        assert (response.status_code, error_of(response)["code"]) == (503, "model_unavailable")
        assert rig.inflight() == 0


@pytest.mark.parametrize("tcp", [False, True])
async def test_connections_closed_between_requests_are_never_seen(tmp_path: Path, tcp: bool) -> None:
    async with one_worker(tmp_path, tcp) as rig:
        for round_ in range(20):
            answers = await asyncio.gather(*(rig.post() for _ in range(5)))
            assert {answer.status_code for answer in answers} == {200}
            rig.workers[0].drop_idle()
            if round_ % 2:
                await asyncio.sleep(0)
        assert len(rig.workers[0].requests) == 100


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
async def test_a_connection_that_dies_as_the_request_is_written_is_replaced(
    tmp_path: Path, family: socket.AddressFamily
) -> None:
    """The worker has closed a kept-alive connection, and the gateway can't know it yet."""
    loop = asyncio.get_running_loop()
    rig = Rig(tmp_path)
    with socket.socket(family) as listener:
        listener.setblocking(False)
        listener.bind(str(tmp_path / "s") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        name = listener.getsockname()
        rig.route(target(f"unix:{name}" if family == socket.AF_UNIX else f"http://127.0.0.1:{name[1]}"))

        async def serve() -> socket.socket:
            while True:
                connection, _ = await loop.sock_accept(listener)
                if (await loop.sock_recv(connection, 10_000)).startswith(b"POST"):
                    break
                connection.close()  # a probe from before
            await loop.sock_sendall(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return connection

        async with rig.running():
            await rig.unprobed()
            response, kept = await asyncio.gather(rig.post(), serve())
            assert response.status_code == 200
            take = rig.app.upstream.take

            def take_what_just_died(address: str) -> Connection | None:
                connection = take(address)
                assert connection is not None
                kept.close()
                return connection

            rig.app.upstream.take = take_what_just_died  # type: ignore[method-assign]
            again = asyncio.create_task(serve())
            response = await rig.post()
            assert response.status_code == 200
            assert rig.inflight() == 0
            (await again).close()


async def test_what_a_worker_may_be_working_on_is_not_repeated(tmp_path: Path) -> None:
    cases = {
        "garbage": (502, "worker_protocol_error"),
        "unframed": (502, "worker_protocol_error"),
        "hang": (504, "worker_timeout"),
    }
    rig = Rig(tmp_path, timeouts={"first_byte": 0.5})
    await two_workers(rig)
    async with rig.running():
        for number, (do, (status, code)) in enumerate(cases.items(), start=1):
            response = await rig.ask(do=do, stream=True)
            assert (do, response.status_code, error_of(response)["code"]) == (do, status, code)
            assert sum(len(worker.requests) for worker in rig.workers) == number
            assert response.headers["x-request-id"]
            assert rig.inflight() == 0
        await until(lambda: all(seen.closed_at for worker in rig.workers for seen in worker.requests))


async def test_an_answer_in_one_piece_may_take_longer_than_a_stream_may_to_begin(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timeouts={"first_byte": 0.2, "total": 6})
    rig.route(target(await rig.worker("slow")))
    async with rig.running():
        assert (await rig.ask(do="json", wait=0.6)).status_code == 200
        response = await rig.ask(do="json", wait=0.6, stream=True)
        assert (response.status_code, error_of(response)["code"]) == (504, "worker_timeout")
        response = await rig.ask(do="hang")
        assert (response.status_code, error_of(response)["code"]) == (504, "worker_timeout")


async def test_a_restart_under_load_is_never_seen(tmp_path: Path) -> None:
    """Swaps: new target published, old one drains, then ends; requests go on all the time."""
    rig = Rig(tmp_path)
    current = await rig.worker("g1")
    rig.route(target(current))
    async with rig.running():
        answers: list[Any] = []
        stop = False

        async def hammer() -> None:
            while not stop:
                answers.append(await rig.ask(do="json", wait=0.002))

        hammers = [asyncio.create_task(hammer()) for _ in range(8)]
        for generation in range(2, 7):
            new = await rig.worker(f"g{generation}")
            rig.route(
                target(current, generation=generation - 1), target(new, slot="t", generation=generation)
            )
            await until(lambda worker=new: worker.requests)  # type: ignore[misc]
            rig.route(target(new, slot="t", generation=generation))
            current.draining = True
            await until(lambda worker=current: all(seen.answered for seen in worker.requests))
            await asyncio.sleep(0.25)
            await current.stop()
            rig.route(target(new, generation=generation))
            current = new
        stop = True
        await asyncio.gather(*hammers)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["served_by"] for answer in answers} == {f"g{index}" for index in range(1, 7)}


async def test_a_refusal_after_a_loss_is_still_a_loss(tmp_path: Path) -> None:
    """The first worker may have begun: nobody is told that nothing was done, and what was reserved stays."""
    limits = {"default": {"tokens_per_minute": 100_000}}
    rig = Rig(tmp_path, limits=limits, health={"max_fails": 1000})
    await two_workers(rig)
    async with rig.running():
        rig.workers[0].full = True
        left = 100_000
        for _ in range(6):
            response = await rig.post({"model": "m", "max_tokens": 5000, "fake": {"do": "eof"}})
            assert (response.status_code, error_of(response)["code"]) == (502, "worker_failed")
            rig.app.router.table.backends["m", "a.1"].limit = 100
            assert int(response.headers["x-ratelimit-remaining-tokens"]) < left - 4000
            left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert len(rig.workers[0].requests) == len(rig.workers[1].requests) == 6


@contextlib.contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """This process can open nothing more; to be called when something else in it may have been closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(null.fileno()))

    with open("/dev/null") as null:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
        try:
            take_all()
            yield take_all
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_gateway_without_descriptors_blames_no_worker(
    tmp_path: Path, tcp: bool, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """It says that it is its own fault, once, and serves again as soon as it can."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(without_descriptors(tmp_path, tcp))


async def without_descriptors(folder: Path, tcp: bool) -> None:
    health = {"probe_interval": 0.1, "max_fails": 1}
    async with one_worker(folder, tcp=tcp, health=health) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        backend = next(iter(rig.app.router.table.backends.values()))
        await until(lambda: backend.health.clear)
        probes = rig.workers[0].probes
        await until(lambda: rig.workers[0].probes > probes)
        await asyncio.sleep(0.01)  # none is under way that the worker couldn't accept any more
        with no_descriptors() as take_all:
            refused = 0
            while refused < 5:
                await asyncio.sleep(0.15)
                take_all()
                writer.write(http_post(b'{"model":"m"}'))
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                if head.startswith(b"HTTP/1.1 200 "):  # a probe that had been under way left it a descriptor
                    rig.workers[0].drop_idle()
                    continue
                refused += 1
                assert head.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in head
                assert b'"gateway_exhausted"' in body
            assert backend.health.clear
        writer.write(http_post(b'{"model":"m"}', b"connection: close\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert "pagefleet_gateway_exhausted_total 5.0" in rig.app.metrics.render().decode()
