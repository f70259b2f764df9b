"""Drives one rollout: the only one who changes its state, which is on disk before anything is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.fleet.driver.clock import steady
from gateway.fleet.driver.hands import GONE, Hands
from gateway.fleet.driver.records import Records
from gateway.fleet.rollout import Refusal, Rollout, actions_of, command, fact
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import Side
from gateway.fleet.unit import UnitStatus

TICK = 1.0  # seconds

log = logging.getLogger(__name__)


class Driver:
    """`rollout` is its state, on disk or about to be; `changed` is set, and replaced, with each new one.

    `finish` does what remains when it is over; OSError when it can't yet. `living`: the gateways that live.
    """

    def __init__(
        self,
        rollout: Rollout,
        make_hands: Callable[[Driver], Hands],
        records: Records,
        finish: Callable[[Rollout], None],
        living: Callable[[], frozenset[str]],
    ) -> None:
        self.rollout = rollout
        self.changed = asyncio.Event()
        self.over = asyncio.Event()
        self._hands = make_hands(self)
        self._records = records
        self._finish = finish
        self._living = living
        self._gateways: frozenset[str] = frozenset()
        self._inbox: asyncio.Queue[e.Fact] = asyncio.Queue()
        self._todo: tuple[e.Action, ...] = ()
        self._unsaved = False
        self._complaint = ""
        self._work: asyncio.Task[None] | None = None
        self._clock = steady(rollout.clock)

    def begin(self, actions: Sequence[e.Action]) -> None:
        """A new rollout, which is on disk already."""
        self._todo = tuple(actions)
        self._go_on()

    def resume(self, *, standby_lives: bool) -> None:
        """After a crash of the supervisor: what was under way is done again, or what follows from the end of
        the standby, which had gone with it."""
        self.report(e.Restarted(rollout_id=self.rollout.id))
        if not standby_lives:
            reason = "it ended with the supervisor"
            self.report(e.StandbyCrashed(rollout_id=self.rollout.id, reason=reason))

    def command(self, asked: e.Command) -> Refusal | None:
        """Done, or refused, at once."""
        answer = command(self.rollout, asked, self._clock())
        if isinstance(answer, Refusal):
            return answer
        self._take(*answer)
        return None

    def report(self, happened: e.Fact) -> None:
        """Something has happened; it is taken in its turn."""
        self._inbox.put_nowait(happened)

    async def run(self) -> None:
        """Until it is over and nothing of it remains to be done."""
        loop = asyncio.get_running_loop()
        due = loop.time() + TICK
        try:
            while not self.over.is_set():
                if loop.time() >= due:  # however much happens
                    due = loop.time() + TICK
                    self._tick()
                    continue
                try:
                    async with asyncio.timeout_at(due):
                        happened = await self._inbox.get()
                except TimeoutError:
                    continue
                self._take(*fact(self.rollout, happened, self._clock()))
        finally:
            await self._drop_work()

    def _tick(self) -> None:
        living = self._living()
        for gateway in sorted(self._gateways - living):
            lost = e.GatewayLost(rollout_id=self.rollout.id, gateway=gateway)
            self._take(*fact(self.rollout, lost, self._clock()))
        self._gateways = living
        self._take(*fact(self.rollout, e.Tick(rollout_id=self.rollout.id), self._clock()))
        if self._work is not None and self._work.done() and not self._work.cancelled():
            error = self._work.exception()
            self._work = None
            if error is not None:  # each action may be repeated
                log.error("rollout %s, %s: tried again", self.rollout.id, self.rollout.phase, exc_info=error)
                self._todo = actions_of(self.rollout)
        self._go_on()  # what a full disk has delayed

    def _take(self, rollout: Rollout, actions: Sequence[e.Action]) -> None:
        self._unsaved |= rollout.revision != self.rollout.revision
        if rollout.phase != self.rollout.phase:
            log.info("rollout %s of %s: %s", rollout.id, rollout.model, rollout.phase)
        self.rollout = rollout
        if actions:
            self._todo = tuple(actions)
        if self._unsaved or self._todo:
            self._go_on()

    def _go_on(self) -> None:
        """Puts the state on disk, then does what it wants done. While the disk is full nothing is done."""
        try:
            if self._unsaved:
                self._records.save(self.rollout)
                self._unsaved = False
                self._announce()
            if self._todo:
                todo, self._todo = self._todo, ()
                self._perform(todo)
            self._complaint = ""
        except OSError as error:
            what = error.filename2 or error.filename or "its state"
            complaint = f"rollout {self.rollout.id} waits: {what} can't be written ({error.strerror})"
            if complaint != self._complaint:
                log.error("%s", complaint)
            self._complaint = complaint

    def _perform(self, actions: tuple[e.Action, ...]) -> None:
        if self._work is not None:
            self._work.cancel()
            self._work = None
        if self.rollout.past_return:  # from here on it is the only one
            self._hands.repair("standby", True)
        if not self.rollout.terminal:
            self._work = asyncio.create_task(
                self._hands.carry_out(self.rollout, actions), name=f"rollout {self.rollout.id}"
            )
            return
        try:
            self._finish(self.rollout)
        except OSError:
            self._todo = actions
            raise
        self.over.set()
        self._announce()

    def _announce(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _drop_work(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    # --- what processes do

    def unit_changed(self, side: Side, status: UnitStatus) -> None:
        """A process of a side has ended. While a side leaves, only the end of all of it says anything."""
        rollout = self.rollout
        about_to_start = status.state == "backoff" and status.retry_at is None  # told of before
        if status.state not in ("backoff", "failed") or about_to_start or rollout.terminal:
            return
        leaving = rollout.leaving == side and rollout.phase != "holding"
        if leaving and any(one.state not in GONE for one in self._hands.statuses(side)):
            return
        reason = f"{status.slot} {status.error or status.state}"
        if side == "primary":
            self.report(e.PrimaryCrashed(rollout_id=rollout.id, reason=reason))
        elif rollout.phase != "starting":  # who starts it says so itself
            self.report(e.StandbyCrashed(rollout_id=rollout.id, reason=reason))
