"""One lane to Redis: operations in order, in batches, within a budget; closed while Redis is not well."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from gateway.limits.redis_link import CONNECT_S, Operation, RedisLink, reason_of, slot_tag
from gateway.limits.rules import LeaseRule

logger = logging.getLogger(__name__)

LARGEST_BATCH = 64
# Operations that nobody waits for go along with the next that somebody does, or alone after this time.
COMPANY_S = 0.002
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0


class RedisFault(Exception):
    """Redis can't be asked now."""


class Owner(Protocol):
    """Whose operations they are."""

    def lost(self, operation: Operation) -> None:
        """Redis did it or didn't, or will: nobody knows."""

    def unwanted(self, operation: Operation, answer: list[int]) -> None:
        """It was done, and who asked had left."""

    async def well_again(self) -> None:
        """Redis answers after a fault, or for the first time."""


class RedisChannel:
    """Sends operations one batch after another: what waits while one is under way makes up the next.

    `degraded` from a fault until a probe finds Redis well; meanwhile `ask` raises RedisFault, which is also
    the answer of operations under way, and `post` does nothing.
    """

    def __init__(self, link: RedisLink, owner: Owner, budget: float, probe_key: str) -> None:
        self.reason: str | None = None
        self.faults = 0
        self._link = link
        self._owner = owner
        self._budget = budget
        self._probe_key = probe_key
        self._waiting: deque[Operation] = deque()
        self._drops: dict[str, Operation] = {}  # of those that wait, by key
        self._urgent = False  # what waits is to go as soon as it can
        self._departs = False  # that is, once all that is ready in the loop has had its turn
        self._sent: list[Operation] | None = None  # the batch under way
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._repairing: asyncio.Task[None] | None = None

    @property
    def degraded(self) -> bool:
        return self.reason is not None

    async def start(self) -> None:
        """Connects; where that fails, goes on trying."""
        try:
            await self._check()
        except Exception as error:
            self._fail(error, ())
        else:
            await self._owner.well_again()

    async def aclose(self) -> None:
        """Sends what waits, then closes the connections; it counts as degraded from then on."""
        self._hurry(asyncio.get_running_loop())
        if self._departs or self._sent is not None:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,), timeout=CONNECT_S)
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self._fail(TimeoutError(), sent)
        if self._repairing is not None:
            self._repairing.cancel()
        self.reason = "closed"
        await self._link.aclose()

    def ask(self, operation: Operation) -> asyncio.Future[list[int]]:
        """Its replies; RedisFault is raised at once or when awaited."""
        if self.reason is not None:
            raise RedisFault
        if not operation.rules:  # it may prolong leases: those that end from now on must end after it
            self._drops.clear()
        loop = asyncio.get_running_loop()
        answer = operation.answer = loop.create_future()
        self._waiting.append(operation)
        self._hurry(loop)
        return answer

    def post(self, operation: Operation) -> None:
        """Sends what needs no answer, a little later; before anything that is asked after it."""
        if self.reason is None:
            self._waiting.append(operation)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(COMPANY_S, self._on_timer)

    def drop(self, key: str, lease: str, rule: LeaseRule) -> None:
        """Posts that a lease has ended; those of one key that wait together are one operation."""
        operation = self._drops.get(key)
        if operation is not None:
            operation.words[2] += 1
            operation.words.append(lease)
            operation.leases.append(lease)
        elif self.reason is None:
            operation = self._drops[key] = Operation([key], ["drop", key, 1, lease], 0, [lease], (rule,))
            self.post(operation)

    def _on_timer(self) -> None:
        self._timer = None
        self._hurry(asyncio.get_running_loop())

    def _hurry(self, loop: asyncio.AbstractEventLoop) -> None:
        self._urgent = bool(self._waiting)
        if self._urgent and self._sent is None and not self._departs:
            self._departs = True
            loop.call_soon(self._depart)

    def _depart(self) -> None:
        self._departs = False
        while self._urgent and self._sent is None:
            self._drops.clear()
            first = [self._waiting.popleft() for _ in range(min(LARGEST_BATCH, len(self._waiting)))]
            self._urgent = bool(self._waiting)
            batch = [one for one in first if one.answer is None or not one.answer.cancelled()]
            if batch:
                self._sent = batch
                try:
                    self._link.send(batch, self._budget, partial(self._arrive, batch))
                except Exception as error:  # whatever it was, nobody may be left waiting
                    self._arrive(batch, error)
        if self._sent is None and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _arrive(self, batch: list[Operation], outcome: list[list[int]] | BaseException) -> None:
        if batch is not self._sent:  # it was given up meanwhile
            return
        self._sent = None
        if isinstance(outcome, BaseException):
            self._fail(outcome, batch)
        else:
            for operation, numbers in zip(batch, outcome, strict=True):
                if operation.answer is None:
                    continue
                if operation.answer.cancelled():
                    self._owner.unwanted(operation, numbers)
                else:
                    operation.answer.set_result(numbers)
        self._depart()

    def _fail(self, error: BaseException, sent: Sequence[Operation]) -> None:
        if self.reason is None:
            logger.warning("limits: Redis at %s: %s", self._link.address, reason_of(error))
        self.reason = reason_of(error)
        self.faults += 1
        failed = [*sent, *self._waiting]
        self._waiting.clear()
        self._drops.clear()
        self._urgent = False
        if failed:  # of a cluster, only the server of some keys may be away
            key = failed[0].keys[0]
            self._probe_key = f"{key[: key.index('{')]}{slot_tag(key)}:probe"
        for operation in failed:
            self._owner.lost(operation)
            if operation.answer is not None and not operation.answer.done():
                operation.answer.set_exception(RedisFault())
        if self._repairing is None or self._repairing.done():
            self._repairing = asyncio.create_task(self._repair())

    async def _repair(self) -> None:
        delay = FIRST_RETRY_S
        while self.reason is not None:
            try:
                await self._check()
            except Exception as error:  # it may be anything, and may pass
                self.reason = reason_of(error)
            else:
                self.reason = None
                logger.warning("limits: Redis at %s answers again", self._link.address)
                await self._owner.well_again()
            if self.reason is not None:  # also by a fault since: then nobody else repairs it
                await asyncio.sleep(delay * random.uniform(0.5, 1))
                delay = min(2 * delay, LAST_RETRY_S)

    async def _check(self) -> None:
        """Raises unless Redis takes writes in time; connecting may take longer.

        Over a new connection: nothing is left in it of what went wrong, and after a failover the address may
        mean another server."""
        self._link.hang_up()
        await self._link.probe(self._probe_key, CONNECT_S)
        await self._link.probe(self._probe_key, self._budget)
