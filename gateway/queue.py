"""Requests that wait for a saturated model, and when they get a worker.

By class first, with ageing; inside a class round by round, one request of each user in a round; inside a
round the earliest deadline first. What can't be served in time is refused at once, with the time after which
it could have been; when the queue is full, the last in that order goes. A request is placed on a worker in
the very step that made room for it, so no slot is left unused and nobody is woken in vain.

While a model is *held* (its worker is being replaced by another one) nobody can be placed. How long that
takes says nothing about how fast the model serves, nor the other way round.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Generic, Literal

from contracts.errors import ApiError
from gateway import errors
from gateway.queue_order import Lane, P, Ticket

CLASS_SECONDS = 30.0  # a class waits so much longer than the one before it, then it goes first
MEMORY = 300.0  # seconds over which the service rate is measured
_KNOWN_AFTER = 2.0  # requests, at least, whose service must have been seen before there is a rate

Priority = Literal["high", "normal", "low"]
CLASSES: tuple[Priority, ...] = ("high", "normal", "low")
LEVELS = {name: level for level, name in enumerate(CLASSES)}
Refusal = Literal["full", "late", "shed", "expired"]


class ServiceRate:
    """How long a saturated model takes per request: slots freed over time, both forgotten slowly.

    Counts over time rather than a mean of gaps: requests that ran in one batch end together.
    """

    def __init__(self) -> None:
        self._freed = 0.0
        self._seconds = 0.0
        self._at: float | None = None

    def resume(self, now: float) -> None:
        """The model is saturated from now on."""
        self._at = now

    def pause(self) -> None:
        """It no longer is: what follows says nothing about how fast it could be."""
        self._at = None

    def freed(self, now: float) -> None:
        """A slot became free while somebody waited for one."""
        if self._at is None:
            return
        passed = now - self._at
        keep = math.exp(-passed / MEMORY)
        self._seconds = self._seconds * keep + passed
        self._freed = self._freed * keep + 1
        self._at = now

    def gap(self, now: float, places: int) -> float | None:
        """Seconds per request, longer the longer the last one keeps everybody waiting; None when too little
        has been seen: less than a turn of all `places`. When a burst has filled them at once, the first to
        end are few, and late for how many will follow."""
        if self._freed < max(_KNOWN_AFTER, places):
            return None
        waiting = now - self._at if self._at is not None else 0.0
        return (self._seconds + waiting) / self._freed


class Queue(Generic[P]):
    """The queue of one model. `size`: most requests in it; `has_room`: whether any worker has a place
    for a request of the class CLASSES[level]; `places`: how many requests its workers have now.

    `waited` is called with the seconds of each who got a place, `refused` with the reason of each who didn't.
    `held`: see the module.
    """

    def __init__(
        self,
        model: str,
        size: int,
        has_room: Callable[[int], bool],
        places: Callable[[], int],
        waited: Callable[[float], None] = lambda seconds: None,
        refused: Callable[[Refusal], None] = lambda reason: None,
    ) -> None:
        self.waiting = 0
        self.held = False
        self._model = model
        self._size = size
        self._has_room = has_room
        self._places = places
        self._waited = waited
        self._refused = refused
        self._lanes: tuple[Lane[P], ...] = tuple(Lane() for _ in CLASSES)
        self._rate = ServiceRate()
        self._numbers = itertools.count()
        self._placing = False
        self._place_again = False

    async def wait(
        self, place: Callable[[], P | None], user: str, priority: Priority, within: float, weight: int = 1
    ) -> P:
        """A place, at most `within` seconds from now. ApiError 503 when there is or will be none.

        Whoever is cancelled leaves at once, and gives back what he was just given.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        ticket = Ticket(place, user, LEVELS[priority], now, (now + within, next(self._numbers)))
        self._enter(ticket, now, within)
        timer = loop.call_at(now + within, self._expire, ticket)
        try:
            placed = await ticket.future
        except asyncio.CancelledError:
            done = ticket.future.done() and not ticket.future.cancelled()
            if done and ticket.future.exception() is None:
                ticket.future.result().release(priority, weight)
            raise
        finally:
            timer.cancel()
            self._leave(ticket)
        self._waited(loop.time() - now)
        return placed

    def slot_freed(self) -> None:
        """A worker of the model has room; call it when somebody is waiting."""
        self._rate.freed(asyncio.get_running_loop().time())
        self.place()

    def place(self) -> None:
        """Gives places to those who wait, as long as there are any. To be called at once when something may
        have made one: then whoever still waits can't be placed, and a newcomer who can overtakes nobody.

        May be called from within itself: placing a request may show that the routes have changed.
        """
        self._place_again = True
        if self._placing:
            return
        self._placing = True
        try:
            while self._place_again:
                self._place_again = False
                while self.waiting and self._place_one():
                    pass
        finally:
            self._placing = False

    def hold(self, held: bool) -> None:
        """From now on the model is held, or no longer is; `place` then gives places to those who waited."""
        if held == self.held:
            return
        self.held = held
        if held:
            self._rate.pause()
        elif self.waiting:
            self._rate.resume(asyncio.get_running_loop().time())

    def backlog(self) -> float:
        """Estimated seconds until all that wait have been served."""
        gap = self._rate.gap(asyncio.get_running_loop().time(), self._places())
        return 1.0 if gap is None else self.waiting * gap

    # --- entering and leaving

    def _enter(self, ticket: Ticket[P], now: float, within: float) -> None:
        lane = self._lanes[ticket.lane]
        gap = self._rate.gap(now, self._places()) if self.waiting and not self.held else None
        if gap is not None:
            ahead = sum(other.waiting for other in self._lanes[: ticket.lane]) + lane.ahead_of(ticket)
            late = (ahead + 1) * gap - within
            if late > 0:
                raise self._refusal("late", late)
        if self.waiting >= self._size:
            self._make_room(ticket)
        lane.insert(ticket)
        self.waiting += 1
        if self.waiting == 1 and not self.held:
            self._rate.resume(now)

    def _make_room(self, ticket: Ticket[P]) -> None:
        """Sends away the last in order, be it this one."""
        lane = next((lane for lane in reversed(self._lanes) if lane.waiting), None)
        last = lane.last() if lane is not None else None
        if lane is None or last is None or last.lane < ticket.lane:
            raise self._refusal("full", self.backlog())
        if last.lane == ticket.lane and not lane.before(ticket, last):
            raise self._refusal("full", self.backlog())
        self._leave(last)
        if not last.future.done():
            last.future.set_exception(self._refusal("shed", self.backlog()))

    def _leave(self, ticket: Ticket[P], *, served: bool = False) -> None:
        if self._lanes[ticket.lane].remove(ticket, served=served):
            self.waiting -= 1
            if not self.waiting:
                self._rate.pause()

    def _expire(self, ticket: Ticket[P]) -> None:
        if not ticket.future.done():
            self._leave(ticket)
            ticket.future.set_exception(self._refusal("expired", self.backlog()))

    def _refusal(self, reason: Refusal, seconds: float) -> ApiError:
        self._refused(reason)
        if self.held:
            return errors.model_held(self._model, reason)
        return errors.overloaded(self._model, reason, seconds)

    # --- placing

    def _place_one(self) -> bool:
        """Whether somebody went. Usually the first in order can; with a split by user it may be a later one
        whose version of the model has room."""
        for lane in sorted(self._lanes, key=_urgency):
            if not lane.waiting or not self._has_room(self._lanes.index(lane)):
                continue
            for ticket in lane.in_order():
                if ticket.future.done():  # cancelled, and its task has not run yet
                    self._leave(ticket)
                    return True
                try:
                    placed = ticket.place()
                except ApiError as error:
                    self._leave(ticket)
                    ticket.future.set_exception(error)
                    return True
                if placed is not None:
                    self._leave(ticket, served=True)
                    ticket.future.set_result(placed)
                    return True
        return False


def _urgency(lane: Lane[P]) -> float:
    if not lane.waiting:
        return math.inf
    head = lane.lines[0].tickets[0]
    return head.arrived + CLASS_SECONDS * head.lane
