"""What gateways do while a real Redis is away, hangs, refuses or comes back empty."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from gateway.limits import Charge, Granted, Limit, Refused, Unavailable
from gateway.limits.redis_limiter import RedisLimiter
from gateway.limits.redis_link import RedisUrlError
from tests.gateway.redis_server import RedisServer, free_port, running

pytestmark = pytest.mark.redis
PASSWORD = "s3cret-Of-Redis"
T = TypeVar("T")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running(tmp_path / "redis") as server:
        yield server


def ann(**bounds: Any) -> list[Charge]:
    return [Charge.of_user("ann", Limit(**bounds))]


def at_once(answer: Coroutine[Any, Any, T]) -> T:
    """What it comes to without ever waiting."""
    with pytest.raises(StopIteration) as end:
        answer.send(None)
    value: T = end.value.value
    return value


async def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def leases(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.zcard("pagefleet:{u:ann}:user:ann:concurrency"))


async def test_a_restart_in_mid_traffic_refuses_nobody_and_leases_are_there_again(
    server: RedisServer,
) -> None:
    limiter = RedisLimiter(server.url)
    await limiter.start()
    charges = ann(qps=100_000, burst=100_000, concurrency=100)
    long = await limiter.acquire(charges)
    assert isinstance(long, Granted)
    answers: list[object] = []
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            answer = await limiter.acquire(charges)
            answers.append(answer)
            await asyncio.sleep(0.005)
            assert isinstance(answer, Granted)
            answer.release()

    clients = [asyncio.create_task(client()) for _ in range(8)]
    await asyncio.sleep(0.2)
    server.kill()
    await eventually(lambda: limiter.degraded)
    assert limiter.state.reason
    during = await limiter.acquire(charges)
    assert isinstance(during, Granted)
    await asyncio.sleep(0.1)
    server.start()
    await eventually(lambda: not limiter.degraded)
    await asyncio.sleep(0.2)
    stop.set()
    await asyncio.gather(*clients)
    assert all(isinstance(answer, Granted) for answer in answers)
    await eventually(lambda: not limiter.degraded)
    # The new Redis was empty: what has been running since before, and since the fault, is made known to it.
    await eventually(lambda: leases(server) == 2)
    long.release()
    during.release()
    await eventually(lambda: leases(server) == 0)
    await limiter.aclose()


async def test_a_paused_redis_costs_no_request_more_than_the_budget(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url)
    await limiter.start()
    charges = ann(qps=1000, burst=1000, concurrency=500)
    before = await limiter.acquire(charges)
    assert isinstance(before, Granted)
    server.pause()
    async with asyncio.timeout(10):  # 50 ms, and a machine that is busy with other things
        held = await asyncio.gather(*(limiter.acquire(charges) for _ in range(100)))
    held += [at_once(limiter.acquire(charges)) for _ in range(100)]  # nobody waits once it is known
    assert {type(answer) for answer in held} == {Granted}
    assert limiter.state.reason == "TimeoutError"
    server.resume()
    await eventually(lambda: not limiter.degraded)
    assert isinstance(await limiter.acquire(charges), Granted)
    for one in (before, *held):
        one.release()  # type: ignore[union-attr]
    # Redis has read by now what was sent to it while it was paused: those leases are gone too.
    await eventually(lambda: leases(server) == 1)
    await limiter.aclose()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_gateway_that_was_held_up_itself_does_not_blame_redis(
    server: RedisServer, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(held_up(server))


async def held_up(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url, budget=1)
    await limiter.start()
    server.pause()
    waiting = asyncio.create_task(limiter.acquire(ann(qps=1000)))
    await asyncio.sleep(0.01)
    server.resume()
    with server.client() as client:
        client.ping()  # it has answered by then
    time.sleep(1.3)  # noqa: ASYNC251
    assert isinstance(await waiting, Granted)
    assert limiter.state.faults == 0
    await limiter.aclose()


async def test_who_waits_while_the_gateway_closes_gets_an_answer(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url, budget=60, on_error="closed")
    await limiter.start()
    server.pause()
    waiting = [asyncio.create_task(limiter.acquire(ann(qps=1000))) for _ in range(100)]
    await asyncio.sleep(0.05)
    await limiter.aclose()
    async with asyncio.timeout(30):
        assert {type(answer) for answer in await asyncio.gather(*waiting)} == {Unavailable}
    server.resume()


async def test_local_limits_are_the_gateways_part_and_their_refusals_are_genuine(server: RedisServer) -> None:
    limiters = [RedisLimiter(server.url, budget=5) for _ in range(3)]
    for limiter in limiters:
        await limiter.start()
    for limiter in limiters:
        await limiter.renew()
    assert [limiter.state.gateways for limiter in limiters] == [3, 3, 3]
    server.kill()
    charges = ann(qps=0.01, burst=9, concurrency=100, tokens_per_minute=900)
    for limiter in limiters:
        answers = [await limiter.acquire(charges, 30) for _ in range(5)]
        assert [type(answer) for answer in answers] == [Granted] * 3 + [Refused] * 2
        assert answers[-1].retry_after == pytest.approx(300, abs=10)
        # Settled and given back in memory as in Redis.
        answers[0].settle(0)
        answers[1].give_back()
        (*_, tokens) = (await limiter.acquire(charges, 30)).quotas()
        assert tokens.remaining in range(300 - 3 * 30, 300 - 2 * 30 + 40)  # five come back each second
        await limiter.aclose()


async def test_requests_that_run_count_for_the_local_limit_too(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url)
    await limiter.start()
    charges = ann(concurrency=3)
    held = [await limiter.acquire(charges) for _ in range(3)]
    server.kill()
    while not limiter.degraded:
        await limiter.acquire(charges)
    assert isinstance(await limiter.acquire(charges), Refused)
    held[0].release()
    assert isinstance(await limiter.acquire(charges), Granted)
    await limiter.aclose()


async def test_closed_and_open_do_as_declared_and_a_fault_is_never_a_refusal(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/nowhere.sock"
    closed, opened = RedisLimiter(nowhere, on_error="closed"), RedisLimiter(nowhere, on_error="open")
    for limiter in (closed, opened):
        await limiter.start()
        assert limiter.degraded
        assert limiter.state.faults == 1
    for _ in range(5):
        no = await closed.acquire(ann(qps=1, burst=1))
        assert isinstance(no, Unavailable)
        assert no.retry_after > 0
        answer = await opened.acquire(ann(qps=1, burst=1), 10)
        assert isinstance(await closed.acquire(ann()), Granted)  # has no limits
        assert isinstance(answer, Granted)
        answer.settle(3)
        answer.release()
    for limiter in (closed, opened):
        await limiter.aclose()


async def test_a_redis_that_starts_later_is_found(tmp_path: Path) -> None:
    late = RedisServer(tmp_path / "redis")
    limiter = RedisLimiter(late.url, on_error="closed", budget=5)
    await limiter.start()
    assert isinstance(await limiter.acquire(ann(qps=1)), Unavailable)
    try:
        late.start()
        await eventually(lambda: not limiter.degraded)
        assert isinstance(await limiter.acquire(ann(qps=1)), Granted)
        await limiter.aclose()
    finally:
        late.kill()


async def test_a_port_that_takes_connections_and_never_answers(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen(64)
        limiter = RedisLimiter(f"unix://{tmp_path}/silent.sock")
        began = time.monotonic()
        await limiter.start()
        assert time.monotonic() - began < 15
        assert isinstance(await limiter.acquire(ann(qps=1)), Granted)
        await limiter.aclose()


async def test_without_the_script_command(tmp_path: Path) -> None:
    with running(tmp_path / "renamed", "--rename-command", "SCRIPT", "") as server:
        await works_and_survives_a_restart(server, server.url)


async def test_a_user_who_may_not_use_script(server: RedisServer) -> None:
    rules = [
        "on",
        ">" + PASSWORD,
        "~pagefleet:*",
        "+@all",
        "-script",
        "-@admin",
        "-client",
        "-hello",
        "-info",
    ]
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "gateway", *rules)
    limiter = RedisLimiter(f"unix://gateway:{PASSWORD}@{server.socket}", budget=5)
    await limiter.start()
    assert isinstance(await limiter.acquire(ann(qps=1, burst=1)), Granted)
    assert isinstance(await limiter.acquire(ann(qps=1, burst=1)), Refused)
    assert limiter.state.faults == 0
    await limiter.aclose()
    with server.client() as client:
        assert "cmdstat_script|load" not in client.info("commandstats")


async def works_and_survives_a_restart(server: RedisServer, url: str) -> None:
    limiter = RedisLimiter(url, budget=5)
    await limiter.start()
    for _ in range(2):
        assert isinstance(await limiter.acquire(ann(qps=0.01, burst=1)), Granted)
        assert isinstance(await limiter.acquire(ann(qps=0.01, burst=1)), Refused)
        assert not limiter.degraded
        server.kill()
        while not limiter.degraded:
            await limiter.acquire(ann(concurrency=100))
        server.start()
        await eventually(lambda: not limiter.degraded)
    await limiter.aclose()


async def test_a_replica_is_not_written_to_until_it_is_a_master(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url, budget=5)
    await limiter.start()
    with server.client() as client:
        client.replicaof("127.0.0.1", free_port())
    answers = [await limiter.acquire(ann(qps=1000, burst=1000)) for _ in range(20)]
    assert all(isinstance(answer, Granted) for answer in answers)
    assert limiter.degraded
    assert "READONLY" in str(limiter.state.reason)
    await asyncio.sleep(0.3)
    assert limiter.degraded  # it answers PING; that isn't enough
    with server.client() as client:
        client.replicaof("NO", "ONE")
    await eventually(lambda: not limiter.degraded)
    assert isinstance(await limiter.acquire(ann(qps=1000, burst=1000)), Granted)
    await limiter.aclose()


async def test_the_password_is_in_no_log_error_or_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    port = free_port()
    with running(tmp_path / "redis", "--requirepass", "another", port=port) as server:
        for url in (
            f"redis://:{PASSWORD}@127.0.0.1:{port}/0",
            f"redis://user:{PASSWORD}@127.0.0.1:{port}/0",
            f"redis://127.0.0.1:{port}/0?password={PASSWORD}",
            f"unix://:{PASSWORD}@{server.socket}",
        ):
            limiter = RedisLimiter(url)
            await limiter.start()
            assert limiter.degraded
            assert PASSWORD not in repr(limiter.state)
            await limiter.aclose()
    assert "127.0.0.1" in caplog.text
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@127.0.0.1:port/0",
        f"redis://a:b:{PASSWORD}@[::1/0",
        f"http://:{PASSWORD}@127.0.0.1/",
        f"unix+cluster://:{PASSWORD}@h:1",
        f"redis://:{PASSWORD}@h:1/0?no_such_option=1",
        f"redis://:{PASSWORD}@h:1/0?socket_timeout=soon",
        f"redis+sentinel://:{PASSWORD}@h:1,h:2",
        f"redis+sentinel://:{PASSWORD}@h:1,h:x/master",
        f"redis+sentinel://:{PASSWORD}@h:1,,h:2/master",
        f"redis+cluster://:{PASSWORD}@h:1,h:99999999",
        f"redis+cluster://:{PASSWORD}@h:1?no_such_option=1",
        "",
        PASSWORD,
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(RedisUrlError, match=r"must look like redis://") as caught:
        RedisLimiter(url)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value, chain=True))


async def test_closing_while_redis_hangs_ends(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url)
    await limiter.start()
    assert isinstance(await limiter.acquire(ann(concurrency=1)), Granted)
    server.pause()
    began = time.monotonic()
    await limiter.aclose()
    assert time.monotonic() - began < 15
    server.resume()


async def test_closing_frees_what_the_gateway_holds(server: RedisServer) -> None:
    limiter = RedisLimiter(server.url, budget=5)
    await limiter.start()
    late = await limiter.acquire(ann(concurrency=1, tokens_per_minute=600), 100)
    assert isinstance(late, Granted)
    assert leases(server) == 1
    await limiter.aclose()
    with server.client() as client:
        assert client.zcard("pagefleet:{gateways}") == 0
        assert len(client.client_list()) == 1
    assert leases(server) == 0
    late.settle(1)
    late.release()
    assert isinstance(await limiter.acquire(ann(concurrency=1)), Granted)
    await asyncio.sleep(0.05)
    with server.client() as client:
        assert len(client.client_list()) == 1
