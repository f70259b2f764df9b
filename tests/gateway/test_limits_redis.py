"""Limits in a real Redis that is well: exact under concurrency, leases, what is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.limits import Charge, Granted, Kind, Limit, Refused
from gateway.limits.redis_limiter import RedisLimiter
from tests.gateway.redis_server import RedisServer, running

pytestmark = pytest.mark.redis
AMPLE = Limit(qps=10_000, burst=10_000, concurrency=1000, tokens_per_minute=10**6)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest_asyncio.fixture
async def limiters(server: RedisServer) -> AsyncIterator[list[RedisLimiter]]:
    """Three gateways'. A loaded machine must not send them to their policy."""
    limiters = [RedisLimiter(server.url, budget=20, lease_ttl=60) for _ in range(3)]
    for limiter in limiters:
        await limiter.start()
    yield limiters
    for limiter in limiters:
        assert limiter.state.faults == 0
        await limiter.aclose()


def ann(**bounds: Any) -> list[Charge]:
    return [Charge.of_user("ann", Limit(**bounds))]


def leases(server: RedisServer, charge: Charge) -> int:
    with server.client() as client:
        return int(client.zcard(f"pagefleet:{{{charge.group}}}:{charge.scope}:{charge.name}:concurrency"))


def age(server: RedisServer, key: str, gateway: str) -> None:
    """As if the life of what this gateway has there, which is half a minute from now at most, were over."""
    with server.client() as client:
        held = {
            name: expires
            for name, expires in client.zrange(key, 0, -1, withscores=True)
            if name.decode().startswith(gateway)
        }
        assert held
        assert all(time.time() < expires / 1e6 <= time.time() + 30 for expires in held.values())
        client.zadd(key, dict.fromkeys(held, (time.time() - 1) * 1e6))


async def eventually(holds: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_three_gateways_and_a_thousand_requests_at_once_let_exactly_the_limit_pass(
    limiters: list[RedisLimiter],
) -> None:
    charges = [*ann(qps=10, burst=10), Charge.of_model("m", AMPLE)]
    began = time.monotonic()
    answers = await asyncio.gather(*(limiters[i % 3].acquire(charges, 5) for i in range(1000)))
    passed = sum(isinstance(answer, Granted) for answer in answers)
    assert 10 <= passed <= 10 + 10 * (time.monotonic() - began)
    # What was refused left nothing behind on the model.
    after = await limiters[0].acquire([Charge.of_model("m", AMPLE)], 5)
    assert isinstance(after, Granted)
    (tokens,) = [quota for quota in after.quotas() if quota.kind is Kind.TOKENS]
    assert tokens.remaining >= 10**6 - 5 * (passed + 1)


async def test_many_clients_never_exceed_rate_nor_concurrency(limiters: list[RedisLimiter]) -> None:
    charges = ann(qps=200, burst=20, concurrency=7)
    running_now, most, passed = 0, 0, 0
    began = time.monotonic()

    async def client(number: int) -> None:
        nonlocal running_now, most, passed
        while passed < 100 or time.monotonic() < began + 0.6:
            answer = await limiters[number % 3].acquire(charges)
            if isinstance(answer, Granted):
                running_now, passed = running_now + 1, passed + 1
                most = max(most, running_now)
                await asyncio.sleep(0.01)
                running_now -= 1
                answer.release()
            else:
                await asyncio.sleep(0.002)

    await asyncio.gather(*(client(number) for number in range(40)))
    assert most == 7
    assert 20 < passed <= 20 + 200 * (time.monotonic() - began)


async def test_a_slot_is_free_for_the_next_request_of_the_same_gateway(limiters: list[RedisLimiter]) -> None:
    charges = ann(concurrency=1)
    for _ in range(50):
        answer = await limiters[0].acquire(charges)
        assert isinstance(answer, Granted)
        assert isinstance(await limiters[1].acquire(charges), Refused)
        answer.release()


async def test_the_wait_that_a_refusal_names_is_true(limiters: list[RedisLimiter]) -> None:
    charges = ann(qps=0.4, burst=1)
    assert isinstance(await limiters[0].acquire(charges), Granted)
    no = await limiters[1].acquire(charges)
    assert isinstance(no, Refused)
    assert no.retry_after is not None
    assert 0 < no.retry_after <= 2.5
    await asyncio.sleep(no.retry_after + 0.001)
    assert isinstance(await limiters[2].acquire(charges), Granted)


async def test_all_limits_are_decided_in_one_round_trip(
    server: RedisServer, limiters: list[RedisLimiter]
) -> None:
    charges = [
        Charge.of_user("ann", AMPLE),
        Charge.of_key("k", "ann", AMPLE),
        Charge.of_model("m", AMPLE),
    ]
    await limiters[0].acquire(charges)
    with server.client() as client:
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        for _ in range(10):
            assert isinstance(await limiters[0].acquire(charges), Granted)
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 10
        client.script_flush()
        assert isinstance(await limiters[0].acquire(charges), Granted)


async def test_tokens_of_an_aborted_request_are_settled_for_every_gateway(
    limiters: list[RedisLimiter],
) -> None:
    charges = ann(tokens_per_minute=600)
    under_way = asyncio.Event()

    async def request() -> None:
        answer = await limiters[0].acquire(charges, 600)
        assert isinstance(answer, Granted)
        under_way.set()
        try:
            await asyncio.sleep(60)
        finally:
            answer.settle(20)
            answer.release()

    task = asyncio.create_task(request())
    await under_way.wait()
    assert isinstance(await limiters[1].acquire(charges, 500), Refused)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    deadline = time.monotonic() + 30
    while not isinstance(answer := await limiters[1].acquire(charges, 500), Granted):
        assert time.monotonic() < deadline  # without the settling it takes 50 seconds
    assert answer.quotas()[0].remaining <= 600 - 500


async def test_numbers_beyond_all_limits_are_no_fault(limiters: list[RedisLimiter]) -> None:
    """Clients may ask for any number of tokens, and broken workers count any."""
    charges = ann(tokens_per_minute=600)
    refused = await limiters[0].acquire(charges, 10**40)
    assert isinstance(refused, Refused)
    assert refused.retry_after is None
    granted = await limiters[0].acquire(charges, 100)
    assert isinstance(granted, Granted)
    granted.settle(10**40)
    refused = await limiters[0].acquire(charges, 1)
    assert isinstance(refused, Refused)
    assert refused.retry_after is not None
    assert refused.retry_after < 3601
    assert limiters[0].state.faults == 0


async def test_a_client_that_leaves_while_its_limits_are_checked_consumes_nothing(
    server: RedisServer, limiters: list[RedisLimiter]
) -> None:
    charges = ann(qps=0.001, burst=5, concurrency=5, tokens_per_minute=1000)
    server.pause()
    waiting = [asyncio.create_task(limiters[0].acquire(charges, 100)) for _ in range(4)]
    await asyncio.sleep(0.05)
    late = [asyncio.create_task(limiters[0].acquire(charges, 100)) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in waiting + late:
        task.cancel()
    await asyncio.gather(*waiting, *late, return_exceptions=True)
    server.resume()
    for _ in range(2):  # the answers that nobody waited for come first, then what undoes them
        await limiters[0].acquire([Charge.of_user("ben", AMPLE)])
    answer = await limiters[0].acquire(charges, 100)
    assert isinstance(answer, Granted)
    assert [quota.remaining for quota in answer.quotas()] == [4, 4, 900]


async def test_leases_of_a_killed_gateway_return_and_those_of_a_living_one_stay(server: RedisServer) -> None:
    charges = ann(concurrency=10)
    dead, alive = (RedisLimiter(server.url, budget=20, lease_ttl=30) for _ in range(2))
    await dead.start()
    await alive.start()
    await dead.renew()
    assert dead.state.gateways == 2
    for _ in range(5):
        assert isinstance(await dead.acquire(charges), Granted)
        assert isinstance(await alive.acquire(charges), Granted)
    assert isinstance(await alive.acquire(charges), Refused)
    assert dead._renewal is not None
    dead._renewal.cancel()  # as a killed process: it renews and releases nothing
    age(server, f"pagefleet:{{{charges[0].group}}}:user:ann:concurrency", dead._id)
    age(server, "pagefleet:{gateways}", dead._id)
    taken = [await alive.acquire(charges) for _ in range(6)]
    assert [type(one) for one in taken] == [Granted] * 5 + [Refused]
    await eventually(lambda: alive.state.gateways == 1)
    await alive.aclose()
    assert leases(server, charges[0]) == 0
    await dead._channel.aclose()


async def test_whatever_is_written_expires(server: RedisServer, limiters: list[RedisLimiter]) -> None:
    bound = Limit(qps=0.1, burst=100, concurrency=10, tokens_per_minute=1000)
    charges = [Charge.of_user("ann", bound), Charge.of_key("k", "ann", bound), Charge.of_model("m", bound)]
    answer = await limiters[0].acquire(charges, 500)
    assert isinstance(answer, Granted)
    answer.settle(900)
    await limiters[0].acquire(charges, 1)
    with server.client() as client:
        lives = {key: client.pttl(key) for key in client.scan_iter()}
    assert len(lives) >= 10
    assert all(0 < life <= 130_000 for life in lives.values()), lives


async def test_a_changed_limit_holds_at_once_on_every_gateway(limiters: list[RedisLimiter]) -> None:
    for _ in range(20):
        assert isinstance(await limiters[0].acquire(ann(qps=0.1, burst=20)), Granted)
    assert isinstance(await limiters[1].acquire(ann(qps=0.1, burst=20)), Refused)
    answer = await limiters[1].acquire(ann(qps=0.1, burst=25))
    assert isinstance(answer, Granted)
    assert answer.quotas()[0].remaining == 4
    # Four times the rate: what was used counts in requests, not in seconds.
    answer = await limiters[2].acquire(ann(qps=0.4, burst=40))
    assert isinstance(answer, Granted)
    assert answer.quotas()[0].remaining == 18


async def test_fleets_with_their_own_prefix_share_a_redis(server: RedisServer) -> None:
    one, other = (RedisLimiter(server.url, budget=20, prefix=prefix) for prefix in ("one", "other"))
    for limiter in (one, other):
        await limiter.start()
        assert isinstance(await limiter.acquire(ann(qps=0.01, burst=1)), Granted)
    for limiter in (one, other):
        assert isinstance(await limiter.acquire(ann(qps=0.01, burst=1)), Refused)
        assert limiter.state.gateways == 1
        await limiter.aclose()
