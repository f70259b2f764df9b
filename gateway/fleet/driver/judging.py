"""What the judge looks at while a step lasts: both versions measured, and asked while their users are few."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.fleet.driver.comparing import users_tell, verdict_on
from gateway.fleet.driver.measure import Counts, Meter, Sample, since
from gateway.fleet.driver.peer import Peer
from gateway.fleet.driver.probing import Living, Prober
from gateway.fleet.driver.records import Records
from gateway.fleet.judge import Limits, Verdict
from gateway.fleet.rollout import Rollout
from gateway.fleet.rollout import events as e

EVERY = 1.0  # seconds
MEASURE_WITHIN = 60.0  # seconds that recreate measures the old version before users have to wait
BEFORE_PROBES = 3  # times as many as the judge needs at least


class Judging:
    """Of one rollout. Verdicts are told to `report`; `last` is the latest one on the present step."""

    def __init__(
        self,
        counts: Counts,
        records: Records,
        model: str,
        limits: Limits,
        report: Callable[[e.Fact], None],
        last: Callable[[], Verdict | None],
    ) -> None:
        self._records = records
        self._limits = limits
        self._report = report
        self._last = last
        self._meter = Meter(counts, model)
        self._first: dict[
            str, Sample
        ] = {}  # readings at the rollout's first step, or at its first since a crash

    async def run(self, rollout: Rollout, change: int, new: Sequence[Peer], old: Living) -> None:
        """A step, from now on until it is cancelled. `old`: who of the old version is there; what one that is
        gone has done counts on, and one that comes joins in."""
        start = await self._meter.read([*new, *old()])
        canary = Sample()
        verdict: Verdict | None = None
        by_users = False

        def probes_wanted() -> bool:
            """Until the step has shown as many as a whole rollout needs, or longer while the judge doubts;
            users, where there are enough, tell by themselves."""
            undecided = verdict is None or verdict.outcome == "hold"
            few = canary.probes.every.requests < self._limits.min_requests
            return (undecided or few) and not by_users

        probing = asyncio.create_task(self._probe(new, old, rollout, probes_wanted))
        try:
            while True:
                await asyncio.sleep(EVERY)
                if probing.done():
                    probing.result()  # a mistake in there is told; without probes the step might never end
                of_new, of_old = await self._read(new, old(), start)
                canary = since(of_new, start)
                before = self._records.before(rollout) or since(of_old, {})
                primary, so_far = since(of_old, start), since(of_old, self._first)
                by_users = users_tell(canary, primary, before, self._limits, so_far=so_far)
                verdict = verdict_on(canary, primary, before, self._limits, self._last(), so_far=so_far)
                self._report(e.Judged(rollout_id=rollout.id, change=change, verdict=verdict))
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _read(
        self, new: Sequence[Peer], old: Sequence[Peer], start: dict[str, Sample]
    ) -> tuple[dict[str, Sample], dict[str, Sample]]:
        """Readings of both versions; those of targets that are new go into `start`, and into `_first`."""
        targets = {peer.target for peer in (*new, *old)}
        counts = await self._meter.read([*new, *old], gone=start.keys() - targets)
        for known in (start, self._first):
            for target, sample in counts.items():
                known.setdefault(target, start.get(target, sample))
        of_new = {peer.target: counts.pop(peer.target) for peer in new}
        return of_new, counts

    async def _probe(
        self, new: Sequence[Peer], old: Living, rollout: Rollout, wanted: Callable[[], bool]
    ) -> None:
        if rollout.options.probes:
            await Prober(self._meter).run(new, old, wanted)

    async def measure_before(self, rollout: Rollout, old: Sequence[Peer]) -> None:
        """Recreate: what the old version did in its life, and with probes now if users were few: many of
        them, since there will be no more when the judge doubts. Once for a rollout."""
        if self._records.before(rollout) is not None:
            return
        enough = BEFORE_PROBES * self._limits.min_requests
        prober = Prober(self._meter)
        deadline = asyncio.get_running_loop().time() + MEASURE_WITHIN
        while True:
            before = since(await self._meter.read(old), {})
            late = asyncio.get_running_loop().time() > deadline
            measured = before.has_users(self._limits) or before.probes.every.requests >= enough
            if late or measured or not old or not rollout.options.probes:
                break
            await prober.once((), old)
        self._records.save_before(rollout, before)
