"""The order in which requests of one class get a worker: round by round, one request of each user in a round;
inside a round the earliest deadline first."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from gateway.identity.identity import Priority

MAX_REACHED = 4096  # users who don't wait of whom it is known which round was theirs


class Placed(Protocol):
    """A place on a worker."""

    def release(self, priority: Priority, weight: int) -> None: ...


P = TypeVar("P", bound=Placed)


class Ticket(Generic[P]):
    """One waiting request. `place`: tries to put it on a worker; ApiError when none can ever take it."""

    __slots__ = ("arrived", "future", "key", "lane", "place", "user")

    def __init__(
        self, place: Callable[[], P | None], user: str, lane: int, arrived: float, key: tuple[float, int]
    ) -> None:
        self.place = place
        self.user = user
        self.lane = lane
        self.arrived = arrived
        self.key = key  # deadline, number
        self.future: asyncio.Future[P] = asyncio.get_running_loop().create_future()


class Line(Generic[P]):
    """The waiting requests of one user, the earliest deadline first, and the round of the first of them."""

    __slots__ = ("round", "tickets")

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.tickets: list[Ticket[P]] = []

    @property
    def key(self) -> tuple[int, float, int]:
        return (self.round, *self.tickets[0].key)

    def index(self, ticket: Ticket[P]) -> int:
        """Where it is, or would be."""
        return bisect.bisect_left(self.tickets, ticket.key, key=_ticket_key)


class Lane(Generic[P]):
    """The waiting requests of one class: a line for each user, in the order in which they are served next."""

    def __init__(self) -> None:
        self.waiting = 0
        self.lines: list[Line[P]] = []
        self._of: dict[str, Line[P]] = {}
        self._round = 0
        self._reached: dict[str, int] = {}  # rounds in which users without a line were served last

    def insert(self, ticket: Ticket[P]) -> None:
        line = self._of.get(ticket.user)
        if line is None:
            line = self._of[ticket.user] = Line(self._next_round(ticket.user))
        else:
            self._take_out(line)
        line.tickets.insert(line.index(ticket), ticket)
        bisect.insort(self.lines, line, key=_line_key)
        self.waiting += 1

    def remove(self, ticket: Ticket[P], *, served: bool = False) -> bool:
        """Whether it was there. One that was served costs its user a round."""
        line = self._of.get(ticket.user)
        index = line.index(ticket) if line is not None else 0
        if line is None or index == len(line.tickets) or line.tickets[index] is not ticket:
            return False
        self._take_out(line)
        del line.tickets[index]
        self.waiting -= 1
        if served:
            self._advance(line.round)
            self._reached[ticket.user] = line.round
            if len(self._reached) > MAX_REACHED:  # as many users as requests: nobody's turn comes twice
                self._advance(self._round + 1)
            line.round += 1
        if line.tickets:
            bisect.insort(self.lines, line, key=_line_key)
        else:
            del self._of[ticket.user]
        if not self._of:
            self._round, self._reached = 0, {}
        return True

    def ahead_of(self, ticket: Ticket[P]) -> int:
        """About how many would be served before this one: in each round one of every user."""
        line = self._of.get(ticket.user)
        own = line.index(ticket) if line is not None else 0
        others = len(self._of) - (line is not None)
        return min(self.waiting, own + (own + 1) * others)

    def last(self) -> Ticket[P]:
        """Who is served last, if nobody else comes."""
        line = max(self.lines, key=lambda line: (line.round + len(line.tickets), line.tickets[-1].key))
        return line.tickets[-1]

    def before(self, ticket: Ticket[P], other: Ticket[P]) -> bool:
        """Whether a newcomer would be served before one who waits."""
        return self._place_of(ticket) < self._place_of(other)

    def in_order(self) -> Iterator[Ticket[P]]:
        """The first of every user, then the others."""
        for line in self.lines:
            yield line.tickets[0]
        for line in self.lines:
            yield from line.tickets[1:]

    def _place_of(self, ticket: Ticket[P]) -> tuple[int, tuple[float, int]]:
        line = self._of.get(ticket.user)
        if line is None:
            return self._next_round(ticket.user), ticket.key
        return line.round + line.index(ticket), ticket.key

    def _next_round(self, user: str) -> int:
        return max(self._round, self._reached.get(user, -1) + 1)

    def _take_out(self, line: Line[P]) -> None:
        del self.lines[bisect.bisect_left(self.lines, line.key, key=_line_key)]

    def _advance(self, round_: int) -> None:
        if round_ > self._round:
            self._round = round_
            self._reached = {user: last for user, last in self._reached.items() if last >= round_}


def _ticket_key(ticket: Ticket[P]) -> tuple[float, int]:
    return ticket.key


def _line_key(line: Line[P]) -> tuple[int, float, int]:
    return line.key
