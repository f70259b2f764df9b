"""More requests than the workers can take: who waits, in which order, who is told to go, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.identity.store import KEYS_FILE, KeyStore
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.rig import Rig, error_of, http_post, target, until

KEYS = {"auth": {"mode": "keys"}}
HEALTH = {"probe_interval": "50ms", "probe_timeout": "1s"}


@asynccontextmanager
async def saturable(folder: Path, capacity: int = 8, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway before one worker that computes `capacity` at a time, so that it gets an eighth more."""
    rig = Rig(folder, **{"health": HEALTH, **settings})
    worker = await rig.worker()
    worker.capacity = capacity
    rig.route(target(worker))
    async with rig.running():
        await until(lambda: backend(rig).limit < 1000)
        yield rig


def backend(rig: Rig) -> Any:
    return rig.app.router.table.backends["m", "s.1"]


def waiting(rig: Rig) -> int:
    return rig.app.router.queue("m").waiting


def metric(rig: Rig, name: str, *labels: str) -> float:
    lines = rig.app.metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith(name + "{") and all(label in line for label in labels)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def fill(rig: Rig, count: int = 9) -> list[asyncio.Task[httpx.Response]]:
    """Streams that last until the worker's gate opens, and take all its places."""
    tasks = [asyncio.create_task(rig.ask(do="sse", gate_at=1, stream=True)) for _ in range(count)]
    await until(lambda: rig.inflight() == count)
    return tasks


async def queued(rig: Rig, *requests: Any) -> list[asyncio.Task[httpx.Response]]:
    """Each waits before the next is sent."""
    tasks = []
    for request in requests:
        before = waiting(rig)
        tasks.append(asyncio.create_task(request))
        await until(lambda before=before: waiting(rig) == before + 1)
    return tasks


def order(worker: FakeWorker, start: int) -> list[str]:
    """The names that requests from number `start` on carried."""
    return [seen.headers["accept"] for seen in worker.requests[start:]]


async def test_a_worker_never_gets_more_than_it_can_take(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        most = 0
        tasks = [asyncio.create_task(rig.ask(do="json", wait=0.02)) for _ in range(100)]
        while not all(task.done() for task in tasks):
            most = max(most, rig.workers[0].busy)
            await asyncio.sleep(0.002)
        assert {task.result().status_code for task in tasks} == {200}
        assert 8 <= most <= 9
        assert metric(rig, "pagefleet_gateway_queue_seconds_count") >= 80
        assert (rig.inflight(), waiting(rig)) == (0, 0)


async def test_several_answers_take_as_many_places(tmp_path: Path) -> None:
    """Of a worker's nine, and at most sixteen, so that one request keeps nobody waiting for long."""
    async with saturable(tmp_path) as rig:
        slow = {"do": "sse", "gate_at": 1}
        body = {"model": "m", "stream": True, "fake": slow}
        running = [asyncio.create_task(rig.post({**body, "n": 7})), asyncio.create_task(rig.post(body))]
        await until(lambda: rig.inflight() == 2)
        heavy = {**body, "prompt": ["a", "b"], "n": 64}
        running.append(asyncio.create_task(rig.post(heavy, path="/v1/completions")))
        await until(lambda: rig.inflight() == 3)  # one place was left, and a heavy request never starves
        assert (backend(rig).load, backend(rig).by_class) == (24, [0, 24, 0])
        tasks = await queued(rig, rig.post(body))
        rig.workers[0].gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*running, *tasks)} == {200}
        assert (backend(rig).load, backend(rig).by_class) == (0, [0, 0, 0])


async def test_who_leaves_while_queued_is_gone_at_once(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        streams = await fill(rig)
        tasks = await queued(rig, *(rig.ask(do="json", stream=number % 2 == 0) for number in range(10)))
        assert metric(rig, "pagefleet_gateway_queue_waiting") == 10
        for task in tasks:
            task.cancel()
        await until(lambda: waiting(rig) == 0)
        rig.workers[0].gate.set()
        await asyncio.gather(*streams)
        assert len(rig.workers[0].requests) == 9
        assert (await rig.post()).status_code == 200


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    async with saturable(tmp_path, queue={"size": 5}) as rig:
        streams = await fill(rig)
        tasks = await queued(rig, *(rig.post() for _ in range(5)))
        response = await rig.post()
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert metric(rig, "pagefleet_gateway_queue_refused_total", 'reason="full"') == 1
        rig.workers[0].gate.set()
        assert {response.status_code for response in await asyncio.gather(*streams, *tasks)} == {200}


async def test_queue_size_0_refuses_what_can_not_begin_now(tmp_path: Path) -> None:
    async with saturable(tmp_path, queue={"size": 0}) as rig:
        streams = await fill(rig)
        assert (await rig.post()).status_code == 503
        rig.workers[0].gate.set()
        await asyncio.gather(*streams)
        assert (await rig.post()).status_code == 200


async def test_a_request_says_how_long_it_can_wait(tmp_path: Path) -> None:
    async with saturable(tmp_path, timeouts={"first_byte": "30s"}) as rig:
        streams = await fill(rig)
        worker = rig.workers[0]
        (patient, hasty) = await queued(
            rig,
            rig.post(headers={"accept": "patient"}),
            rig.post(headers={"accept": "hasty", "x-request-timeout": "20"}),
        )
        response = await rig.post(headers={"x-request-timeout": "0.2"})
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert metric(rig, "pagefleet_gateway_queue_refused_total", 'reason="expired"') == 1
        worker.gate.set()
        await asyncio.gather(*streams, patient, hasty)
        assert order(worker, 9) == ["hasty", "patient"]
        for value in ("", "soon", "-1", "0", "nan", "inf", "1e400"):
            assert (await rig.post(headers={"x-request-timeout": value})).status_code == 200


async def test_a_worker_hears_what_is_left_of_the_patience_and_may_find_it_too_late(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        streams = await fill(rig)
        (waiter,) = await queued(rig, rig.post(headers={"x-request-timeout": "30"}))
        await asyncio.sleep(0.3)
        rig.workers[0].gate.set()
        await asyncio.gather(*streams, waiter)
        told = float(rig.workers[0].requests[-1].headers["x-request-timeout"])
        assert 1 < told <= 29.7
        assert (await rig.post()).status_code == 200
        assert "x-request-timeout" not in rig.workers[0].requests[-1].headers
        before = len(rig.workers[0].requests)
        late = await rig.ask(do="refuse", why="late")
        assert (late.status_code, error_of(late)["code"]) == (503, "overloaded")
        assert len(rig.workers[0].requests) == before + 1, "nobody else has more time for it"


async def test_a_raised_capacity_is_used_at_once(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        streams = await fill(rig)
        (task,) = await queued(rig, rig.post())
        rig.workers[0].capacity = 16
        assert (await task).status_code == 200
        rig.workers[0].gate.set()
        await asyncio.gather(*streams)


async def test_a_new_replica_takes_what_waits(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        streams = await fill(rig)
        (task,) = await queued(rig, rig.post())
        other = await rig.worker("other")
        rig.route(target(rig.workers[0]), target(other, slot="t"))
        assert (await task).json()["served_by"] == "other"
        rig.workers[0].gate.set()
        await asyncio.gather(*streams)


async def test_a_worker_that_dies_leaves_nobody_waiting(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        streams = await fill(rig)
        tasks = await queued(rig, *(rig.post() for _ in range(4)))
        await rig.workers[0].stop()
        rig.route(target(rig.workers[0], state="down"))
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {503}
        assert all(b"stream_interrupted" in response.content for response in await asyncio.gather(*streams))
        assert (rig.inflight(), waiting(rig)) == (0, 0)


async def test_two_gateway_processes_share_a_worker(tmp_path: Path) -> None:
    """Each has its half, or what the other leaves."""
    async with saturable(tmp_path, capacity=16, processes=2) as rig:
        assert backend(rig).limit == 18
        foreign = [
            asyncio.create_task(hold(rig.workers[0], tmp_path)) for _ in range(6)
        ]  # what another gateway sent
        await until(lambda: backend(rig).limit == 12)
        foreign += [asyncio.create_task(hold(rig.workers[0], tmp_path)) for _ in range(12)]
        await until(lambda: backend(rig).limit == 9)
        for task in foreign:
            task.cancel()
        await until(lambda: backend(rig).limit == 18)


async def hold(worker: FakeWorker, folder: Path) -> None:
    _, writer = await asyncio.open_unix_connection(worker.address.removeprefix("unix:"))
    writer.write(http_post(b'{"fake": {"do": "hang"}}'))
    try:
        await asyncio.Event().wait()
    finally:
        writer.close()


# --- classes


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Headers of a caller of each class."""
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        yield {
            priority: {"authorization": f"Bearer {store.create(priority, priority=priority)[1]}"}
            for priority in ("high", "normal", "low")
        }


async def test_the_class_of_a_key_reaches_the_worker_and_a_clients_word_does_not(
    tmp_path: Path, keys: dict[str, dict[str, str]]
) -> None:
    async with saturable(tmp_path, **KEYS) as rig:
        for priority, headers in keys.items():
            for forged in ("high", "low", "highest", ""):
                await rig.post(headers={**headers, "X-Pagefleet-Priority": forged})
                assert rig.workers[0].requests[-1].headers["x-pagefleet-priority"] == priority


async def test_without_keys_everybody_is_normal(tmp_path: Path) -> None:
    async with saturable(tmp_path) as rig:
        await rig.post(headers={"x-pagefleet-priority": "high"})
        assert rig.workers[0].requests[-1].headers["x-pagefleet-priority"] == "normal"


async def test_interactive_requests_go_before_batch_which_is_shed_first(
    tmp_path: Path, keys: dict[str, dict[str, str]]
) -> None:
    async with saturable(tmp_path, **KEYS, queue={"size": 4}) as rig:

        def post(priority: str, name: str) -> Any:
            return rig.post(headers={**keys[priority], "accept": name})

        worker = rig.workers[0]
        body = {"model": "m", "stream": True, "fake": {"do": "sse", "gate_at": 1}}
        streams = [asyncio.create_task(rig.post(body, headers=keys["high"])) for _ in range(9)]
        await until(lambda: rig.inflight() == 9)
        tasks = await queued(
            rig, post("low", "batch1"), post("low", "batch2"), post("normal", "normal"), post("high", "high")
        )
        urgent = asyncio.create_task(post("high", "urgent"))
        shed = await tasks[1]
        assert (shed.status_code, error_of(shed)["code"]) == (503, "overloaded")
        refused = await post("low", "batch3")
        assert refused.status_code == 503
        assert metric(rig, "pagefleet_gateway_queue_refused_total", 'reason="shed"') == 1
        worker.gate.set()
        await asyncio.gather(*streams, *tasks, urgent)
        assert order(worker, 9) == ["high", "urgent", "normal", "batch1"]


async def test_batch_work_in_the_worker_keeps_no_interactive_request_in_the_gateway(
    tmp_path: Path, keys: dict[str, dict[str, str]]
) -> None:
    """What the worker has of batch work is the worker's to put back."""
    async with saturable(tmp_path, **KEYS) as rig:
        body = {"model": "m", "stream": True, "fake": {"do": "sse", "gate_at": 1}}
        streams = [asyncio.create_task(rig.post(body, headers=keys["low"])) for _ in range(9)]
        await until(lambda: rig.inflight() == 9)
        (batch,) = await queued(rig, rig.post(headers=keys["low"]))
        assert (await rig.post(headers=keys["high"])).status_code == 200
        assert (await rig.post(headers=keys["normal"])).status_code == 200
        assert not batch.done()
        rig.workers[0].gate.set()
        await asyncio.gather(*streams, batch)
        assert backend(rig).by_class == [0, 0, 0]


async def test_load_far_above_capacity_is_served_at_full_rate_and_told_the_truth(tmp_path: Path) -> None:
    """200 ms a request and 9 at a time are 45 a second; many times as many come. What is accepted is served
    in time, what isn't is refused."""
    async with saturable(tmp_path, timeouts={"first_byte": "4s"}, queue={"size": 2000}) as rig:
        loop = asyncio.get_running_loop()
        took: dict[int, list[float]] = {}
        told: list[int] = []

        async def one() -> None:
            began = loop.time()
            response = await rig.ask(do="json", wait=0.2)
            took.setdefault(response.status_code, []).append(loop.time() - began)
            if response.status_code == 503:
                assert error_of(response)["code"] == "overloaded"
                told.append(int(response.headers["retry-after"]))

        tasks = []
        for _ in range(60):
            tasks += [asyncio.create_task(one()) for _ in range(15)]
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        assert set(took) <= {200, 503}
        assert len(took[200]) > 30
        assert told
        assert all(1 <= seconds <= 60 for seconds in told)
        assert (rig.inflight(), waiting(rig)) == (0, 0)
