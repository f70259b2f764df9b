"""Redis Cluster and Sentinel, of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import uvloop
from redis.asyncio.connection import SSLConnection

from gateway.limits import Charge, Granted, Limit, Refused, Scope
from gateway.limits.bounds import Bounds
from gateway.limits.overrides import Entry
from gateway.limits.redis_limiter import RedisLimiter
from gateway.limits.redis_link import _client
from gateway.limits.redis_overrides import RedisOverrides
from tests.gateway.redis_server import RedisServer, free_port, running, watched

pytestmark = pytest.mark.redis
SLOTS = 16384


async def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("cluster")
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(3):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "15000", "--cluster-port")
            place = folder / str(number)
            nodes.append(stack.enter_context(running(place, *options, str(free_port()), port=free_port())))
        clients = [stack.enter_context(node.client()) for node in nodes]
        bounds = [0, SLOTS // 3, 2 * SLOTS // 3, SLOTS]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            bus = node.client().config_get("cluster-port")["cluster-port"]
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        deadline = time.monotonic() + 60
        while not all(client.cluster("info")["cluster_state"] == "ok" for client in clients):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield nodes


def url_of(cluster: list[RedisServer]) -> str:
    """Of a cluster whose nodes may be slow to answer: the machine may have much else to do."""
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in cluster)
    return f"redis+cluster://{nodes}/?socket_connect_timeout=60"


def slot_of(name: str) -> int:
    return int(redis.cluster.key_slot(name.encode()))


def models_on_every_node() -> list[str]:
    """A model's name for each third of the slots."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < 3:
        name = f"model{number}"
        found.setdefault(slot_of("m:" + name) * 3 // SLOTS, name)
        number += 1
    return [found[third] for third in range(3)]


async def test_in_a_cluster_a_request_is_granted_whole_or_not_at_all(cluster: list[RedisServer]) -> None:
    limiters = [RedisLimiter(url_of(cluster), budget=20) for _ in range(2)]
    for limiter in limiters:
        await limiter.start()
    ample = Limit(qps=0.01, burst=100, concurrency=100, tokens_per_minute=10**5)
    scarce = Limit(qps=0.01, burst=4, concurrency=4)
    for model in models_on_every_node():
        charges = [
            Charge.of_model(model, scarce),
            Charge.of_user(model, ample),
            Charge.of_key("k", model, ample),
        ]
        began = time.monotonic()
        answers = await asyncio.gather(*(limiters[i % 2].acquire(charges, 100) for i in range(40)))
        passed = [answer for answer in answers if isinstance(answer, Granted)]
        refusals = [answer for answer in answers if isinstance(answer, Refused)]
        assert len(passed) == 4
        assert {no.over.scope for no in refusals} == {Scope.MODEL}
        for limiter in limiters:
            await limiter.renew()  # comes after all that they still had to give back
        # The user's limits were decided first and had to be given back 36 times.
        after = await limiters[0].acquire(charges[1:], 100)
        assert isinstance(after, Granted)
        left = [quota.remaining for quota in after.quotas()]
        assert left[:2] == left[3:5] == [95, 95]
        drained = (time.monotonic() - began) * 10**5 / 60
        assert 10**5 - 500 <= left[2] <= 10**5 - 500 + drained
        passed[0].settle(0)
        passed[1].give_back()
        await limiters[1].renew()
        again = await limiters[0].acquire(charges[1:], 100)
        assert isinstance(again, Granted)
        assert [quota.remaining for quota in again.quotas()][:2] == [95, 95]
        for one in (*passed, after, again):
            one.release()
    for limiter in limiters:
        await limiter.renew()
        assert limiter.state.gateways == 2
        assert limiter.state.faults == 0
    for limiter in limiters:
        await limiter.aclose()
    for node in cluster:
        with node.client() as client:
            assert not list(client.scan_iter("*:concurrency"))


async def test_a_users_flood_ends_before_it_touches_the_models_limit(cluster: list[RedisServer]) -> None:
    limiter = RedisLimiter(url_of(cluster), budget=20)
    await limiter.start()
    model = Charge.of_model("shared", Limit(qps=0.01, burst=100))
    flood = [Charge.of_user("flood", Limit(qps=0.01, burst=1)), model]
    answers = await asyncio.gather(*(limiter.acquire(flood) for _ in range(50)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 1
    answer = await limiter.acquire([model])
    assert isinstance(answer, Granted)
    assert answer.quotas()[0].remaining == 98
    await limiter.aclose()


async def test_a_cluster_node_that_hangs_leaves_it_to_the_policy_and_is_found_again(
    cluster: list[RedisServer],
) -> None:
    limiter = RedisLimiter(url_of(cluster))
    await limiter.start()
    limit = Limit(qps=1000, burst=1000, concurrency=100)
    models = [Charge.of_model(model, limit) for model in models_on_every_node()]
    for model in models:
        assert isinstance(await limiter.acquire([model]), Granted)
    await eventually(lambda: not limiter.degraded)  # of a busy machine
    cluster[1].pause()
    try:
        async with asyncio.timeout(10):
            assert isinstance(await limiter.acquire([models[1]]), Granted)
        assert limiter.degraded
        await asyncio.sleep(0.3)
        assert limiter.degraded  # the probe asks the node that failed
        assert isinstance(await limiter.acquire([models[0]]), Granted)
    finally:
        cluster[1].resume()
    await eventually(lambda: not limiter.degraded)
    for model in models:
        assert isinstance(await limiter.acquire([model]), Granted)
    await eventually(lambda: not limiter.degraded)
    await limiter.aclose()


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[tuple[str, list[RedisServer]]]:
    with watched(tmp_path) as found:
        yield found


async def test_sentinel_names_the_master_and_after_a_failover_the_new_one(
    sentinel: tuple[str, list[RedisServer]],
) -> None:
    url, (master, replica) = sentinel
    limiter = RedisLimiter(url, budget=5)
    await limiter.start()
    assert not limiter.degraded
    charges = [Charge.of_user("ann", Limit(qps=0.01, burst=1, concurrency=9))]
    held = await limiter.acquire(charges)
    assert isinstance(held, Granted)
    assert isinstance(await limiter.acquire(charges), Refused)
    with master.client() as client:
        assert client.exists("pagefleet:{u:ann}:user:ann:requests")
    master.kill()
    while not limiter.degraded:
        await limiter.acquire([Charge.of_user("ben", Limit(qps=1000))])
    await eventually(lambda: not limiter.degraded)
    assert isinstance(await limiter.acquire([Charge.of_user("ben", Limit(qps=1000))]), Granted)
    with replica.client() as client:
        assert client.role()[0] == b"master"
        assert client.exists("pagefleet:{u:ben}:user:ben:requests")
        await eventually(lambda: client.zcard("pagefleet:{u:ann}:user:ann:concurrency") == 1)
    held.release()
    await limiter.aclose()


def test_credentials_tls_and_options_of_a_url_reach_masters_and_sentinels() -> None:
    url = "rediss+sentinel://me:p%40ss@[::1]:1,h/main/2?ssl_ca_certs=/ca&sentinel_password=other"
    client, is_cluster, address = _client(url)
    assert not is_cluster
    assert address == "rediss+sentinel://[::1]:1,h/main/2"
    pool = client.connection_pool
    kwargs = pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("me", "p@ss", 2)
    assert kwargs["ssl_ca_certs"] == "/ca"
    assert issubclass(pool.connection_class, SSLConnection)
    assert pool.service_name == "main"
    sentinels = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
    places = [(one.connection_kwargs["host"], one.connection_kwargs["port"]) for one in sentinels]
    assert places == [("::1", 1), ("h", 26379)]
    for one in sentinels:
        assert issubclass(one.connection_class, SSLConnection)
        assert one.connection_kwargs["password"] == "other"
        assert one.connection_kwargs.get("username") is None

    client, is_cluster, _ = _client("rediss+cluster://:secret@h:7000,i:7001?ssl_ca_certs=/ca")
    assert is_cluster
    assert client.connection_kwargs["password"] == "secret"
    assert client.connection_kwargs["connection_class"] is SSLConnection
    assert [(node.host, node.port) for node in client.nodes_manager.startup_nodes.values()] == [
        ("h", 7000),
        ("i", 7001),
    ]


async def test_limits_set_while_running_are_shared_in_a_cluster(cluster: list[RedisServer]) -> None:
    one, two = RedisOverrides(url_of(cluster), within=60), RedisOverrides(url_of(cluster), within=60)
    ours = {"user:ann": Entry(5, Bounds(qps=1)), "model:m": Entry(6, Bounds(concurrency=None))}
    assert await one.exchange(ours, changed=True) == {}
    assert await two.exchange({"user:ann": Entry(7, Bounds(qps=2))}, changed=True) == {
        "model:m": Entry(6, Bounds(concurrency=None))
    }
    assert await one.exchange(ours, changed=False) == {"user:ann": Entry(7, Bounds(qps=2))}
    for shared in (one, two):
        await shared.aclose()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Of localhost, signed by itself: (certificate, key)."""
    made, key = folder / "tls.crt", folder / "tls.key"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(made)]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    return made, key


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_limits_over_tls_with_a_password(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    made, key = certificate(tmp_path)
    port = free_port()
    tls = ("--tls-port", str(port), "--tls-cert-file", str(made), "--tls-key-file", str(key))
    with running(tmp_path / "redis", *tls, "--tls-auth-clients", "no", "--requirepass", "secret") as server:
        url = f"rediss://:secret@localhost:{port}/3?ssl_ca_certs={made}"
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(counting(url, server))


async def counting(url: str, server: RedisServer) -> None:
    limiter = RedisLimiter(url, budget=20)
    await limiter.start()
    await eventually(lambda: not limiter.degraded)
    charges = [Charge.of_user("ann", Limit(qps=0.01, burst=200))]
    answers = await asyncio.gather(*(limiter.acquire(charges) for _ in range(300)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 200
    with server.client(password="secret", db=3) as client:
        assert client.exists("pagefleet:{u:ann}:user:ann:requests")
        others = [one["id"] for one in client.client_list() if one["id"] != str(client.client_id())]
        assert [client.client_kill_filter(_id=one) for one in others] == [1]
        async with asyncio.timeout(60):
            while not client.exists("pagefleet:{u:bob}:user:bob:requests"):
                await limiter.acquire([Charge.of_user("bob", Limit(qps=0.01))])
                await asyncio.sleep(0.01)
    await limiter.aclose()
