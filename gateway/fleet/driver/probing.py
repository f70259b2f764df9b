"""Requests of the driver's own, for as long as a new version has too few users to be judged by.

They come in small rounds, which cost a worker little more than one request does, and further apart while
users are served. Those of a round share the worker's steps, so their times depend on each other: a round may
be worth no more than one request, and the judge counts it as that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence

from contracts.times import bucket_of
from gateway.fleet.driver.measure import Meter
from gateway.fleet.driver.peer import Lost, Peer, Refused, number_in
from gateway.fleet.driver.proof import tokens
from gateway.fleet.judge import Window

LENGTHS = (8, 16, 32)  # tokens of a prompt
TOKENS = 3  # of an answer
AT_ONCE = 4  # on each worker; fewer where one of them computes fewer at a time
PAUSE = 0.1  # seconds between one round and the next: rounds of fast workers must not take all of a core
LONG_PAUSE = 1.0  # seconds
MANY = 250  # rounds, after which the pauses are long
SHARE = 0.1  # of the time, for rounds beside requests of users: those of all models, who may share a card

Living = Callable[[], Sequence[Peer]]

log = logging.getLogger(__name__)


class Prober:
    """Sends the same prompts to both versions at the same time, straight to the workers."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._turn = itertools.count()
        self._number = itertools.count()
        self._at_once: int | None = None
        self._salt = os.urandom(4).hex()

    async def run(self, new: Sequence[Peer], old: Living, wanted: Callable[[], bool]) -> None:
        """As long as they are wanted; looks again a while later when they aren't. `old`: who is there now."""
        before = self._meter.traffic()
        while True:
            if wanted():
                began = time.monotonic()
                turn = await self.once(new, old())
                after = self._meter.traffic()
                took = time.monotonic() - began
                await asyncio.sleep(pause(turn, took, has_users=_beside(before, after) > 0))
                before = after
            else:
                await asyncio.sleep(0.5)

    async def once(self, new: Sequence[Peer], old: Sequence[Peer]) -> int:
        """Returns how many rounds there were before."""
        turn = next(self._turn)
        if self._at_once is None:
            self._at_once = min([AT_ONCE, *await asyncio.gather(*map(_capacity, (*new, *old)))])
        numbers = list(itertools.islice(self._number, self._at_once))
        asked = [(peer, number) for peer in (*new, *old) for number in numbers]
        before = [self._meter.users(side) for side in (new, old)]
        probes = await asyncio.gather(
            *(_probe(peer, number, f"probe-{self._salt}-{number}") for peer, number in asked)
        )
        after = [self._meter.users(side) for side in (new, old)]
        beside_new, beside_old = map(_beside, before, after)
        even = beside_new * len(old) <= beside_old * len(new)  # for each process
        for (peer, _), probe in zip(asked, probes, strict=True):
            self._meter.count(peer, probe, even=even)
        return turn


def pause(turn: int, took: float, *, has_users: bool) -> float:
    """Seconds until the next round, after one that took so many. Users feel what a round computes."""
    least = PAUSE if turn < MANY else LONG_PAUSE
    return max(least, min(LONG_PAUSE, took * (1 / SHARE - 1))) if has_users else least


def _beside(before: tuple[int, int], after: tuple[int, int]) -> int:
    """How many requests ran at some time between two readings of what has ended and what is in flight, which
    may be some tenths of a second old."""
    return after[0] - before[0] + max(before[1], after[1])


async def _capacity(peer: Peer) -> int:
    """How many requests it computes at a time."""
    try:
        return number_in(await peer.get("/health"), "max_num_seqs", AT_ONCE)
    except (Lost, Refused):
        return AT_ONCE


async def _probe(peer: Peer, number: int, salt: str) -> Window:
    """What is to be counted of it."""
    try:
        times = await peer.timed(tokens(LENGTHS[number % len(LENGTHS)]), TOKENS, salt)
    except Refused as error:
        if error.is_failure:
            return Window(requests=1, errors=1)
        log.info("%s refused a probe: %s", peer.target, error)  # full, draining, or too small for it
        await asyncio.sleep(0.5)
        return Window()
    except Lost:
        return Window(requests=1, errors=1)
    return Window(requests=1, ttft={bucket_of(times.ttft): 1}, tpot={bucket_of(times.tpot): 1})
