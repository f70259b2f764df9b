"""A model on hold: its requests wait for the worker that comes, and nobody hears of an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.errors import ApiError
from gateway.fleet.observer import Observer
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.queue import Priority, Queue
from gateway.routing import Router, RouterSettings
from gateway.targets import Backend
from tests.gateway.gateway_processes import Client, gateways
from tests.gateway.rig import Rig, error_of, target, until


def ready(slot: str, **fields: Any) -> Target:
    return Target(slot=slot, generation=1, address=f"unix:/{slot}", **{"state": "ready", **fields})


def write(path: Path, epoch: int, *targets: Target, **fields: Any) -> None:
    routes = Routes(model="m", epoch=epoch, targets=targets, **fields)
    write_routes(path, RoutesFile(epoch=epoch, models={"m": routes}))


def wait(router: Router, user: str = "u", tried: tuple[str, ...] = ()) -> asyncio.Task[Backend]:
    return asyncio.create_task(router.wait("m", user, "normal", 60, tried, b""))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- the router


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.json"


async def test_who_waits_gets_the_first_target_with_weight(path: Path) -> None:
    write(path, 1, ready("old", weight_bp=0), hold=True)
    router = Router(path, {})
    assert router.claim("m", "u") is None
    assert router.not_ready() == ["m"]
    waiting = [wait(router, f"u{number}", ("old.1",)) for number in range(3)]
    await settle()
    write(path, 2, ready("old", weight_bp=0, state="draining"), ready("new", state="starting"), hold=True)
    router.refresh()
    await settle()
    assert not any(task.done() for task in waiting)
    write(path, 3, ready("new"))
    router.refresh()
    assert {(await task).target.slot for task in waiting} == {"new"}
    assert router.table.backends["m", "new.1"].inflight == 3
    assert router.not_ready() == []


async def test_the_end_of_a_hold_without_a_target_is_the_normal_error(path: Path) -> None:
    write(path, 1, hold=True)
    router = Router(path, {})
    waiting = wait(router)
    await settle()
    write(path, 2, ready("new", state="down"))
    router.refresh()
    with pytest.raises(ApiError) as caught:
        await waiting
    assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
    assert router.queue("m").waiting == 0


async def test_a_target_with_weight_is_used_whatever_the_hold_says(path: Path) -> None:
    write(path, 1, ready("a"), hold=True)
    router = Router(path, {})
    assert router.claim("m", "u") is not None
    assert not router.queue("m").held


async def test_a_queue_made_during_a_hold_knows_of_it(path: Path) -> None:
    write(path, 1, hold=True)
    router = Router(path, {}, settings=RouterSettings(queue_size=1))
    waiting = wait(router)
    await settle()
    with pytest.raises(ApiError) as caught:
        await wait(router)
    assert (caught.value.status, caught.value.code) == (503, "model_starting")
    waiting.cancel()


async def test_routes_that_change_while_a_request_is_placed_place_it_once(path: Path) -> None:
    """A claim without a target reads the routes again, which places those who wait."""
    write(path, 1, ready("a"))
    router = Router(path, {})
    router.table.backends["m", "a.1"].limit = 0
    waiting = [wait(router, f"u{number}") for number in range(4)]
    await settle()
    refresh = router.refresh

    def refresh_meets_another_change() -> None:
        router.refresh = refresh  # type: ignore[method-assign]
        write(path, 3, ready("b"))
        refresh()

    write(path, 2, ready("a", state="down"))  # nobody to claim: refresh is called from within
    router.refresh = refresh_meets_another_change  # type: ignore[method-assign]
    refresh()
    taken = await asyncio.gather(*waiting)
    assert {backend.target.slot for backend in taken} == {"b"}
    assert router.table.backends["m", "b.1"].inflight == 4


# --- the rate at which the model serves


class Place:
    """One place on one worker, which is away while the queue is held."""

    def __init__(self) -> None:
        self.free = 0
        self.queue: Queue[Place] = Queue("m", 100, lambda level: self.free > 0, lambda: 0)

    def take(self) -> Place | None:
        if self.queue.held or not self.free:
            return None
        self.free -= 1
        return self

    def release(self, priority: Priority = "normal") -> None:
        self.free += 1
        if self.queue.waiting:
            self.queue.slot_freed()

    def wait(self, within: float) -> asyncio.Task[Place]:
        return asyncio.create_task(self.queue.wait(self.take, "u", "normal", within))


async def test_a_hold_neither_uses_nor_changes_the_estimate_of_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    ahead, real = 0.0, loop.time()
    monkeypatch.setattr(loop, "time", lambda: real + ahead)
    place = Place()

    async def serve(count: int) -> None:
        """At two seconds a request."""
        nonlocal ahead
        for _ in range(count):
            ahead += 2
            place.release()
            await settle()

    waiting = [place.wait(10_000) for _ in range(20)]
    await settle()
    await serve(10)
    assert place.queue.backlog() == pytest.approx(20, rel=0.1)
    place.queue.hold(True)
    place.release()  # the old worker ends what it has
    ahead += 900
    assert place.queue.backlog() == pytest.approx(20, rel=0.1)
    hasty = place.wait(1)  # by the rate it would be too late
    await settle()
    assert not hasty.done()
    assert place.queue.waiting == 11
    place.queue.hold(False)
    place.queue.place()
    await settle()
    assert hasty.done()  # its deadline is the first
    assert place.queue.backlog() == pytest.approx(20, rel=0.1)
    late = place.wait(1)
    await settle()
    error = late.exception()
    assert isinstance(error, ApiError)
    assert error.code == "overloaded"
    await serve(10)
    await asyncio.gather(*waiting)
    assert place.queue.waiting == 0


async def test_a_hold_that_began_empty_leaves_the_rate_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    ahead, real = 0.0, loop.time()
    monkeypatch.setattr(loop, "time", lambda: real + ahead)
    place = Place()
    place.queue.hold(True)
    waiting = [place.wait(10_000) for _ in range(12)]
    await settle()
    ahead += 600
    place.queue.hold(False)
    for _ in range(10):
        ahead += 2
        place.release()
        await settle()
    assert place.queue.backlog() == pytest.approx(2 * 2, rel=0.1)
    for task in waiting:
        task.cancel()


# --- a gateway


def waiting_in(rig: Rig) -> int:
    return rig.app.router.queue("m").waiting


@asynccontextmanager
async def held(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway whose model has just lost its worker."""
    rig = Rig(folder, **{"health": {"probe_interval": "50ms"}, **settings})
    rig.route(target(await rig.worker("old")))
    async with rig.running():
        await until(lambda: rig.app.router.not_ready() == ["idle"])
        assert (await rig.post()).status_code == 200
        rig.route(target(rig.workers[0], weight_bp=0), hold=True)
        await until(lambda: rig.app.router.table.epoch == rig.epoch)
        yield rig


async def release(rig: Rig) -> None:
    new = await rig.worker("new")
    rig.route(target(new, generation=2))


async def queued(rig: Rig, count: int, **options: Any) -> list[asyncio.Task[httpx.Response]]:
    tasks = [asyncio.create_task(rig.post(**options)) for _ in range(count)]
    before = waiting_in(rig)
    await until(lambda: waiting_in(rig) == before + count)
    return tasks


async def test_requests_wait_longer_than_connections_may_be_silent(tmp_path: Path) -> None:
    async with held(tmp_path, timeouts={"idle": "1.5s"}) as rig:
        streams = [asyncio.create_task(rig.ask(do="sse", stream=True)) for _ in range(3)]
        await until(lambda: waiting_in(rig) == 3)
        tasks = await queued(rig, 5)
        ready = await rig.client.get("/ready")
        assert (ready.status_code, ready.json()["not_ready"]) == (503, ["m", "idle"])
        await asyncio.sleep(3.0)
        assert not any(task.done() for task in tasks)
        await release(rig)
        answers = await asyncio.gather(*tasks)
        assert [(one.status_code, one.json()["served_by"]) for one in answers] == [(200, "new")] * 5
        assert {one.headers["x-pagefleet-target"] for one in answers} == {"s.2"}
        assert all(one.text.endswith("data: [DONE]\n\n") for one in await asyncio.gather(*streams))
        assert len(rig.workers[0].requests) == 1
        assert (rig.inflight(), waiting_in(rig)) == (0, 0)


async def test_a_request_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    async with held(tmp_path, timeouts={"first_byte": "5s"}) as rig:
        for response in (await rig.post(), await rig.post(headers={"x-request-timeout": "0.2"})):
            assert (response.status_code, error_of(response)["code"]) == (503, "model_starting")
            assert response.headers["retry-after"] == "5"
        await release(rig)
        await until(lambda: rig.app.router.not_ready() == ["idle"])
        assert (await rig.post()).status_code == 200


async def test_more_than_may_wait_are_told_when_to_come_back(tmp_path: Path) -> None:
    async with held(tmp_path, queue={"size": 4}) as rig:
        tasks = await queued(rig, 4)
        for _ in range(3):
            response = await rig.post()
            assert (response.status_code, error_of(response)["code"]) == (503, "model_starting")
            assert response.headers["retry-after"] == "5"
        await release(rig)
        assert {one.status_code for one in await asyncio.gather(*tasks)} == {200}


async def test_who_leaves_a_hold_is_gone_and_gives_back_what_it_had(tmp_path: Path) -> None:
    async with held(tmp_path, limits={"default": {"concurrency": 3}}) as rig:
        tasks = await queued(rig, 3)
        assert (await rig.post()).status_code == 429
        tasks.pop().cancel()
        await until(lambda: waiting_in(rig) == 2)
        tasks += await queued(rig, 1)
        assert (await rig.post()).status_code == 429
        await release(rig)
        assert {one.status_code for one in await asyncio.gather(*tasks)} == {200}
        assert len(rig.workers[1].requests) == 3
        assert (await rig.post()).status_code == 200


async def test_who_is_refused_in_a_hold_has_used_nothing(tmp_path: Path) -> None:
    bounds = {"qps": 0.01, "burst": 3}
    async with held(tmp_path, limits={"default": bounds}, queue={"size": 0}) as rig:
        for _ in range(5):  # more than the limit has left
            assert (await rig.post()).status_code == 503


async def test_a_hold_that_is_given_up_is_the_normal_error(tmp_path: Path) -> None:
    async with held(tmp_path) as rig:
        tasks = await queued(rig, 3)
        rig.route(target(rig.workers[0], state="down"))
        answers = await asyncio.gather(*tasks)
        assert {(one.status_code, error_of(one)["code"]) for one in answers} == {(503, "model_unavailable")}


async def test_a_worker_that_drains_too_early_sends_its_requests_into_the_hold(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    old = await rig.worker("old")
    rig.route(target(old))
    async with rig.running():
        assert (await rig.post()).status_code == 200
        old.draining = True
        rig.route(target(old, weight_bp=0), hold=True)  # not applied yet: a refusal makes the gateway look
        task = asyncio.create_task(rig.post())
        await until(lambda: waiting_in(rig) == 1)
        await release(rig)
        assert (await task).json()["served_by"] == "new"


# --- gateway processes


async def test_recreate_under_load_is_never_seen(tmp_path: Path) -> None:
    """Hold, barrier, the old worker away, a new one: three gateways, and twelve clients that never pause."""
    async with gateways(tmp_path) as (running, rig):
        observer = Observer({slot: running.state.board(slot) for slot in running.slots})
        done = asyncio.Event()
        bodies = [{"model": "m", "user": f"u{number}", "fake": {"wait": 0.01}} for number in range(12)]
        clients = [Client(running, json.dumps(body).encode()) for body in bodies]
        tasks = [asyncio.create_task(client.run(done.is_set)) for client in clients]
        for generation in (2, 3):
            old = rig.workers[-1]
            marks = [client.answers for client in clients]
            await until(lambda m=marks: all(c.answers > mark + 5 for c, mark in zip(clients, m)), 60)  # type: ignore[misc]
            current = f"s.{generation - 1}"
            rig.route(target(old, generation=generation - 1, weight_bp=0), hold=True)
            await until(
                lambda: observer.applied(rig.epoch) and not observer.inflight("m", [current]),  # noqa: B023
                60,
            )
            assert old.busy == 0
            served = len(old.requests)
            await asyncio.sleep(0.5)
            assert len(old.requests) == served
            await old.stop()
            new = await rig.worker(f"w{generation}")
            rig.route(target(new, generation=generation, state="starting", weight_bp=0), hold=True)
            await asyncio.sleep(0.3)
            rig.route(target(new, generation=generation))
            await until(lambda new=new: len(new.requests) > 24, 60)  # type: ignore[misc]
        done.set()
        await asyncio.gather(*tasks)
        assert [client.failures for client in clients] == [[]] * 12
        total = sum(client.answers for client in clients)
        await until(lambda: observer.window("m", ["s.1", "s.2", "s.3"]).requests == total, 30)
        assert observer.window("m", ["s.1", "s.2", "s.3"]).errors == 0
