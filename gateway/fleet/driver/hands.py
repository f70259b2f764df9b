"""Carries out what a rollout wants done. Each action may be asked for again at any time: done is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.fleet.commands import Slot
from gateway.fleet.driver.judging import Judging
from gateway.fleet.driver.memory import until_free
from gateway.fleet.driver.peer import Lost, Peer, Refused, number_in, peers
from gateway.fleet.driver.proof import Unproven, check_identity, run_golden, warm_up
from gateway.fleet.driver.records import Records
from gateway.fleet.judge import Verdict
from gateway.fleet.observer import Observer
from gateway.fleet.publisher import Split
from gateway.fleet.rollout import Rollout
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.model import Side
from gateway.fleet.unit import Timing, UnitState, UnitStatus
from gateway.fleet.workers import Workers, gpus_of
from gateway.settings import Judge

POLL = 0.1  # seconds between looks at states and boards
RESTORE_TRIES = 3  # crashes of the old version, started again, that say it can't be

GONE: tuple[UnitState, ...] = ("backoff", "failed", "stopped")
UNBORN: tuple[UnitState, ...] = ("waiting", "starting")  # no user has been there yet


@dataclass(frozen=True)
class Site:
    """What all rollouts share."""

    workers: Workers
    observer: Observer
    records: Records
    timing: Timing


@dataclass(frozen=True)
class Team:
    """Who takes part: the slots of each side, with what they run."""

    slots: Mapping[Side, Sequence[Slot]]


class Hands:
    """Of one rollout. What becomes of an action is told to `report`; `last` is the latest verdict on the
    present step."""

    def __init__(
        self,
        site: Site,
        team: Team,
        report: Callable[[e.Fact], None],
        last: Callable[[], Verdict | None],
    ) -> None:
        self._site = site
        self._team = team
        self._report = report
        first = team.slots["primary"][0]
        self._golden = first.entry.golden
        self._model = first.entry.name
        self._judging = Judging(
            site.observer, site.records, self._model, first.entry.judge or Judge(), report, last
        )
        self._epoch = 0  # of the routes file with the latest weights

    async def carry_out(self, rollout: Rollout, actions: Sequence[e.Action]) -> None:
        """In their order; cancelled when the rollout wants something else."""
        cuts = any(isinstance(action, e.CutStreams) for action in actions)
        for action in actions:
            if not (cuts and isinstance(action, e.Drain)):  # cutting fences as well
                await self._one(rollout, action)

    async def _one(self, rollout: Rollout, action: e.Action) -> None:
        match action:
            case e.StartStandby():
                await self._start_standby(rollout.id)
            case e.CheckIdentity():
                await self._prove(check_identity, e.IdentityConfirmed(rollout_id=rollout.id))
            case e.WarmUp():
                await self._prove(warm_up, e.WarmedUp(rollout_id=rollout.id))
            case e.RunGolden():
                await self._run_golden(rollout.id)
            case e.SetWeights():
                await self._set_weights(rollout, action)
            case e.Judge():
                await self._judge(rollout, action.change)
            case e.AwaitBarrier():
                await self._barrier(rollout.id, action)
            case e.Drain():
                await self._drain(rollout.id, action.side)
            case e.CutStreams():
                await self._cut(rollout.id, action.side)
            case e.Stop():
                await self._stop(rollout.id, action.side)
            case e.RestorePrimary():
                await self._restore(rollout.id)

    # --- who is there

    def statuses(self, side: Side) -> list[UnitStatus]:
        units = (self._site.workers.unit(slot.name) for slot in self._team.slots[side])
        return [unit.status for unit in units if unit is not None]

    def repair(self, side: Side, repaired: bool) -> None:
        """Whether its processes are started again when they end; those that have ended are, from now on."""
        for slot in self._team.slots[side]:
            unit = self._site.workers.unit(slot.name)
            if unit is not None and repaired:
                self._site.workers.add(slot)
            elif unit is not None:
                unit.repaired = False

    def _peers(self, side: Side, without: Collection[UnitState] = ()) -> list[Peer]:
        """Those whose process lives, and not in a state of these."""
        living = [one for one in self.statuses(side) if one.state not in GONE and one.generation]
        return [self._peer(one) for one in living if one.state not in without]

    def _peer(self, status: UnitStatus) -> Peer:
        slot, generation = status.slot, status.generation
        return Peer(self._site.workers.uds(slot, generation), slot, generation, self._model)

    def _serving(self) -> dict[str, UnitStatus]:
        """The old version's workers that can be measured, by target."""
        found = [one for one in self.statuses("primary") if one.state in ("ready", "draining")]
        return {f"{one.slot}.{one.generation}": one for one in found}

    # --- the proof

    async def _start_standby(self, rollout_id: str) -> None:
        for slot in self._team.slots["standby"]:
            self._site.workers.add(slot, repaired=False)
        while True:
            await asyncio.sleep(POLL)
            found = self.statuses("standby")
            for status in found:
                if status.state in GONE:
                    reason = f"{status.slot} {status.error or status.state}"
                    self._report(e.StandbyFailed(rollout_id=rollout_id, reason=reason))
                    return
            if found and all(status.state == "ready" for status in found):
                self._report(e.StandbyReady(rollout_id=rollout_id))
                return

    async def _prove(self, proof: Callable[[Peer], Awaitable[None]], passed: e.Fact) -> None:
        async with peers(self._peers("standby")) as standby:
            try:
                for peer in standby:
                    await proof(peer)
            except Unproven as error:
                self._report(e.StandbyFailed(rollout_id=passed.rollout_id, reason=str(error)))
                return
        self._report(passed)

    async def _run_golden(self, rollout_id: str) -> None:
        async with peers(self._peers("standby")) as standby:
            try:
                for peer in standby:
                    await run_golden(peer, self._golden)
            except Unproven as error:
                self._report(e.GoldenFailed(rollout_id=rollout_id, reason=str(error)))
                return
        self._report(e.GoldenPassed(rollout_id=rollout_id))

    # --- users

    async def _set_weights(self, rollout: Rollout, wanted: e.SetWeights) -> None:
        if wanted.hold and rollout.leaving == "primary":
            async with peers(self._peers("primary")) as old:
                await self._judging.measure_before(rollout, old)
        primary, standby = (self._team.slots[side][0].variant for side in ("primary", "standby"))
        split = Split(
            weights={primary: wanted.primary_bp, standby: wanted.standby_bp},
            hold=wanted.hold,
            rollout_id=rollout.id,
            salt=rollout.id,
        )
        self._epoch = self._site.workers.publisher.split(self._model, split)
        await self._until_applied()
        self._report(e.Applied(rollout_id=rollout.id, change=wanted.change))

    async def _until_applied(self) -> None:
        while not self._site.observer.applied(self._epoch):
            await asyncio.sleep(POLL)

    async def _barrier(self, rollout_id: str, wanted: e.AwaitBarrier) -> None:
        while True:
            targets = [f"{one.slot}.{one.generation}" for one in self.statuses(wanted.side)]
            observer = self._site.observer
            if observer.applied(self._epoch) and not observer.inflight(self._model, targets):
                break
            await asyncio.sleep(POLL)
        if wanted.side == "primary":
            await self._until_alive("standby")
        self._report(e.BarrierReached(rollout_id=rollout_id, change=wanted.change))

    async def _until_alive(self, side: Side) -> None:
        """Until each of its workers says that it makes progress: from here on there is no way back to the
        other side. One that hangs is killed in the end, and that is its crash."""
        async with peers(self._peers(side)) as living:
            for peer in living:
                while not await _makes_progress(peer):
                    await asyncio.sleep(POLL)

    async def _judge(self, rollout: Rollout, change: int) -> None:
        """With those of the old version that are there."""
        async with peers(self._peers("standby")) as new, peers([]) as met:

            def living() -> list[Peer]:
                serving, known = self._serving(), {peer.target for peer in met}
                met.extend(self._peer(status) for target, status in serving.items() if target not in known)
                return [peer for peer in met if peer.target in serving]

            await self._judging.run(rollout, change, new, living)

    # --- the end of a version

    async def _drain(self, rollout_id: str, side: Side) -> None:
        await self._until_empty(side)
        self._report(e.Drained(rollout_id=rollout_id, side=side))

    async def _cut(self, rollout_id: str, side: Side) -> None:
        self.repair(side, False)
        cut = 0
        async with peers(self._peers(side)) as leaving:
            for peer in leaving:
                try:
                    await peer.post("/admin/drain")
                    cut += number_in(await peer.post("/admin/abort"), "aborted", 0)
                except (Lost, Refused):  # its end, or the time limit, is the way on
                    continue
        await self._until_empty(side)
        self._report(e.Drained(rollout_id=rollout_id, side=side, cut=cut))

    async def _until_empty(self, side: Side) -> None:
        """Fences the side's workers until each says that it has no request, or its process is gone."""
        self.repair(side, False)
        async with peers(self._peers(side, without=UNBORN)) as leaving:
            waiting = {peer.slot: peer for peer in leaving}
            while waiting:
                gone = {status.slot for status in self.statuses(side) if status.state in GONE}
                for slot, peer in list(waiting.items()):
                    if slot in gone or await _is_empty(peer):
                        del waiting[slot]
                await asyncio.sleep(POLL if waiting else 0)

    async def _stop(self, rollout_id: str, side: Side) -> None:
        patience = self._site.timing.drain + self._site.timing.stop_margin
        slots = self._team.slots[side]
        gpus = {gpu for slot in slots for gpu in gpus_of(slot.entry.worker)}
        await asyncio.gather(*(self._site.workers.remove(slot.name, patience) for slot in slots))
        await until_free(gpus)
        self._report(e.Stopped(rollout_id=rollout_id, side=side))

    async def _restore(self, rollout_id: str) -> None:
        for slot in self._team.slots["primary"]:
            self._site.workers.add(slot)
        while True:
            await asyncio.sleep(POLL)
            found = self.statuses("primary")
            for status in found:
                if status.state == "failed" or status.restarts >= RESTORE_TRIES:
                    reason = status.error or status.last_exit or status.state
                    self._report(e.PrimaryFailed(rollout_id=rollout_id, reason=reason))
                    return
            if found and all(status.state == "ready" for status in found):
                break
        async with peers(self._peers("primary")) as primary:
            try:
                for peer in primary:
                    await check_identity(peer)
                    await warm_up(peer)
            except Unproven as error:
                self._report(e.PrimaryFailed(rollout_id=rollout_id, reason=str(error)))
                return
        self._report(e.PrimaryReady(rollout_id=rollout_id))


async def _makes_progress(peer: Peer) -> bool:
    try:
        await peer.get("/health")
    except (Lost, Refused):
        return False
    return True


async def _is_empty(peer: Peer) -> bool:
    """Tells the worker to drain. One that doesn't answer isn't empty: it may be busy."""
    try:
        return not (await peer.post("/admin/drain")).get("inflight")
    except (Lost, Refused):
        return False
