from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway.queue import CLASS_SECONDS, Priority, Queue, ServiceRate
from gateway.queue_order import MAX_REACHED, Lane, Ticket


class Pool:
    """`slots` places; the queue in front of them, used as the router does."""

    def __init__(self, slots: int, size: int = 1000) -> None:
        self.free = slots
        self.order: list[str] = []
        self.waited: list[float] = []
        self.refused: list[str] = []
        self.queue: Queue[Pool] = Queue(
            "m",
            size,
            lambda level: self.free > 0,
            lambda: slots - self.free,
            self.waited.append,
            self.refused.append,
        )

    def take(self, name: str) -> Pool | None:
        if not self.free:
            return None
        self.free -= 1
        self.order.append(name)
        return self

    def release(self, priority: Priority = "normal", weight: int = 1) -> None:
        self.free += 1
        if self.queue.waiting:
            self.queue.slot_freed()

    async def get(
        self, name: str, user: str = "", priority: Priority = "normal", within: float = 60.0
    ) -> Pool:
        placed = self.take(name)
        if placed is None:
            placed = await self.queue.wait(lambda: self.take(name), user or name, priority, within)
        return placed


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def queued(*requests: Coroutine[Any, Any, Pool]) -> list[asyncio.Task[Pool]]:
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(request))
        await settle()
    return tasks


async def drain(pool: Pool, count: int) -> list[str]:
    """Serves the next `count`, one at a time."""
    for _ in range(count):
        pool.release()
        await settle()
    return pool.order


async def test_places_go_out_in_order_of_deadlines() -> None:
    pool = Pool(1)
    await pool.get("first")
    await queued(pool.get("c", within=30), pool.get("a", within=10), pool.get("b", within=20))
    assert await drain(pool, 3) == ["first", "a", "b", "c"]
    assert len(pool.waited) == 3


async def test_interactive_goes_before_batch_until_batch_has_waited_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    ahead = 0.0
    real = loop.time
    pool = Pool(1)
    await pool.get("first")
    monkeypatch.setattr(loop, "time", lambda: real() + ahead)
    await queued(
        pool.get("batch", priority="low", within=1e6), pool.get("n1"), pool.get("high", priority="high")
    )
    assert (await drain(pool, 1))[1:] == ["high"]
    ahead = CLASS_SECONDS - 5
    await queued(pool.get("n2"))
    assert (await drain(pool, 1))[2:] == ["n1"]
    ahead = CLASS_SECONDS + 5
    await queued(pool.get("n3"))
    assert (await drain(pool, 3))[3:] == ["n2", "batch", "n3"]


async def test_users_take_turns_however_many_requests_one_has() -> None:
    pool = Pool(1)
    await pool.get("first")
    await queued(*(pool.get(f"a{number}", "a") for number in range(50)))
    assert (await drain(pool, 10))[-1] == "a9"
    await queued(pool.get("b0", "b"), pool.get("b1", "b"), pool.get("c0", "c"))
    order = (await drain(pool, 6))[11:]
    assert set(order[:3]) == {"a10", "b0", "c0"} or order.index("b0") <= 2
    assert order.index("c0") <= 3
    assert "b1" in order


async def test_a_cancelled_request_leaves_at_once_and_its_place_goes_to_the_next() -> None:
    pool = Pool(1)
    await pool.get("first")
    tasks = await queued(pool.get("a"), pool.get("b"), pool.get("c"))
    tasks[0].cancel()
    pool.release()  # `a` has not even run since
    await settle()
    assert pool.order == ["first", "b"]
    pool.release()  # c has its place now, and leaves before it can use it
    tasks[2].cancel()
    await settle()
    assert (pool.free, pool.queue.waiting) == (1, 0)
    assert tasks[2].cancelled()


async def test_who_was_given_a_place_as_he_left_passes_it_on() -> None:
    pool = Pool(1)
    await pool.get("first")
    tasks = await queued(pool.get("a"), pool.get("b"))
    pool.release()
    tasks[0].cancel()
    await settle()
    assert pool.order == ["first", "a", "b"]
    assert tasks[1].done()
    assert pool.free == 0


async def test_a_full_queue_sheds_batch_first_then_who_has_the_most() -> None:
    pool = Pool(1, size=4)
    await pool.get("first")
    batch = await queued(pool.get("b1", priority="low"), pool.get("b2", priority="low"))
    many = await queued(pool.get("a1", "a"), pool.get("a2", "a"))
    refused = await queued(pool.get("b3", priority="low"))
    assert isinstance(refused[0].exception(), ApiError)
    await queued(pool.get("c", "c"))
    assert [task.done() for task in batch] == [False, True]
    await queued(pool.get("d", "d"))
    assert batch[0].done()
    await queued(pool.get("e", "e"))
    assert [task.done() for task in many] == [False, True]
    error = many[1].exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (503, "overloaded")
    assert int(error.headers["retry-after"]) >= 1
    assert pool.refused == ["full", "shed", "shed", "shed"]
    assert pool.queue.waiting == 4
    await drain(pool, 4)


async def test_a_deadline_ends_the_wait() -> None:
    pool = Pool(1)
    await pool.get("first")
    with pytest.raises(ApiError) as caught:
        await pool.get("a", within=0.05)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert pool.queue.waiting == 0
    assert pool.refused == ["expired"]


def test_the_service_rate_is_that_of_saturated_times_only() -> None:
    rate = ServiceRate()
    assert rate.gap(0, 1) is None
    rate.resume(0)
    for second in range(1, 21):
        for _ in range(4):  # batches of four, one a second
            rate.freed(second)
    assert rate.gap(20, 1) == pytest.approx(0.25, rel=0.05)
    rate.pause()
    rate.freed(500)
    assert rate.gap(1000, 1) == pytest.approx(0.25, rel=0.05)
    rate.resume(1000)
    stuck = rate.gap(1060, 1)
    assert stuck is not None
    assert stuck > 0.9


async def test_what_cannot_be_served_in_time_is_refused_with_an_honest_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    ahead, real = 0.0, loop.time()
    monkeypatch.setattr(loop, "time", lambda: real + ahead)
    pool = Pool(1)
    await pool.get("first")
    await queued(*(pool.get(f"a{number}", within=1000) for number in range(40)))
    for _ in range(10):  # two seconds a request
        ahead += 2
        pool.release()
        await settle()
    waiting = pool.queue.waiting
    assert waiting == 30
    with pytest.raises(ApiError) as caught:
        await pool.get("late", priority="low", within=30)
    told = int(caught.value.headers["retry-after"])
    assert told == pytest.approx((waiting + 1) * 2 - 30, abs=3)
    # Honest: after that time the same request is taken, and is served in time.
    for _ in range(told // 2 + 1):
        ahead += 2
        pool.release()
        await settle()
    (task,) = await queued(pool.get("again", priority="low", within=30))
    began = ahead
    while not task.done():
        ahead += 2
        pool.release()
        await settle()
    assert ahead - began <= 30
    assert pool.refused == ["late"]


async def test_a_burst_that_fills_all_places_at_once_is_not_judged_by_the_first_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred places, filled in one moment, four seconds each: the first to end after three seconds says
    nothing about how many a second there will be."""
    loop = asyncio.get_running_loop()
    ahead, real = 0.0, loop.time()
    monkeypatch.setattr(loop, "time", lambda: real + ahead)
    pool = Pool(100)
    for number in range(100):
        await pool.get(f"r{number}")
    await queued(*(pool.get(f"a{number}", within=60) for number in range(200)))
    for _ in range(4):  # 0.75 s each: at that rate the last would wait for two and a half minutes
        ahead += 0.75
        pool.release()
        await settle()
    (task,) = await queued(pool.get("newcomer", within=60))
    for _ in range(297):
        ahead += 0.02
        pool.release()
        await settle()
    assert task.done()
    assert not pool.refused


@pytest.mark.parametrize("seed", range(5))
async def test_no_slot_is_lost_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(3, size=20)
    held: list[Pool] = []
    tasks: list[asyncio.Task[Pool]] = []
    actions: list[Callable[[], object]] = [
        lambda: tasks.append(
            asyncio.create_task(
                pool.get(
                    "x", rng.choice("abc"), rng.choice(["high", "normal", "low"]), rng.choice([0.001, 5])
                )
            )
        ),
        lambda: held.pop().release() if held else None,
        lambda: rng.choice(tasks).cancel() if tasks else None,
    ]
    for _ in range(2000):
        rng.choices(actions, (5, 4, 1))[0]()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                held.append(task.result())
        assert pool.free + len(held) <= 3
    while tasks or held:
        while held:
            held.pop().release()
        await settle()
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                held.append(task.result())
    assert (pool.free, pool.queue.waiting) == (3, 0)


async def test_who_was_served_is_remembered_within_bounds() -> None:
    """A user of its own for every request, of a model that is never idle."""
    lane: Lane[Pool] = Lane()

    def ticket(user: str, number: int) -> Ticket[Pool]:
        return Ticket(lambda: None, user, 0, 0.0, (60.0, number))

    lane.insert(patient := ticket("patient", 10**9))
    again = [ticket("again", number) for number in (1, 2)]
    for one in again:
        lane.insert(one)
    lane.remove(again[0], served=True)
    for number in range(3 * MAX_REACHED):
        lane.insert(one := ticket(f"user {number}", number))
        assert lane.remove(one, served=True)
    assert len(lane._reached) <= MAX_REACHED + 1
    # Whoever waits keeps his place: before those who come now.
    lane.insert(ticket("late", 0))
    assert [one.user for one in lane.in_order()] == ["patient", "again", "late"]
    assert lane.remove(patient)
