"""What two versions of a model do, over one interval: the numbers that the judge compares.

Requests and errors are the gateways' (their boards), times are the workers' (`GET /internal/window`): both
only grow, so an interval is the difference of two readings. While the new version has too few users to be
judged by, the driver asks both versions the same prompts at the same time, straight at the workers, and takes
the times by itself. Users' requests and probes aren't the same work, so times are compared users with users,
or probes with probes, never a mixture of one with a mixture of the other; errors count wherever they happen.

Users' requests count by step, since a version's load changes with its share of the users. Probes go straight
to the workers, so those of a rollout's earlier steps count on; each step must show some of its own, which are
judged by themselves, too (gateway/fleet/judge.py). They are forgotten with the supervisor's process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from contracts.times import Times as Buckets
from contracts.times import bucket_of
from gateway.fleet.driver.peer import Lost, Peer, Refused
from gateway.fleet.driver.proof import tokens
from gateway.fleet.judge import SEVERITY, Limits, Reference, Verdict, Window, judge, step_least

PROBE_LENGTHS = (8, 16, 32)  # tokens
PROBE_TOKENS = 3
PROBE_PAUSE = 0.02  # seconds between one pair of probes and the next
MANY_PROBES = 1000  # after so many they come once a second

log = logging.getLogger(__name__)


class Counts(Protocol):
    """The part of gateway.fleet.observer.Observer that counts."""

    def window(self, model: str, targets: Collection[str]) -> Window: ...


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one version did: for users (with the probes' times in it, which the workers don't tell apart), and
    for probes alone; `earlier`: for probes of the steps before."""

    users: Window = Window()
    probes: Window = Window()
    earlier: Window = Window()

    def __add__(self, other: Sample) -> Sample:
        return Sample(
            users=self.users + other.users,
            probes=self.probes + other.probes,
            earlier=self.earlier + other.earlier,
        )

    def by_users(self, limits: Limits) -> bool:
        """Whether there are users enough to be judged by. Their number is the gateways': the workers' times
        hold probes, too, also those of an earlier rollout."""
        times = min(sum(self.users.ttft.values()), sum(self.users.tpot.values()))
        return min(self.users.requests, times - self.probes.requests) >= limits.min_requests

    def window(self, by_users: bool) -> Window:
        """All requests and errors, and the times of one kind."""
        times = self.users if by_users else self.probes
        return Window(
            requests=self.users.requests + self.probes.requests,
            errors=self.users.errors + self.probes.errors,
            ttft=times.ttft,
            tpot=times.tpot,
        )


def verdict_on(
    canary: Sample, primary: Sample, before: Sample, limits: Limits, last: Verdict | None
) -> Verdict:
    """On a step so far. Where the primary has too few users in it to be a measure (at 100 %, or when it is
    gone), what it did `before` is: in its life so far, when it carried the load that the canary has now."""
    if canary.by_users(limits):
        reference: Reference = "same interval"
        if not primary.by_users(limits) and before.by_users(limits):
            primary, reference = before, "before the rollout"
        return judge(canary.window(True), primary.window(True), limits, reference=reference, before=last)
    if primary.probes.requests:
        return _by_probes(canary, primary, limits, last)
    return judge(
        canary.window(False), before.window(False), limits, reference="before the rollout", before=last
    )


def _by_probes(canary: Sample, primary: Sample, limits: Limits, last: Verdict | None) -> Verdict:
    """The probes of a canary with more users to serve may be later than those of a version that has little
    left to do, if they aren't later than that one's were on the steps before, when it had more. The milder
    verdict counts then: what has become slow is later than both."""

    def verdict(other: Window, reference: Reference) -> Verdict:
        return judge(*whole, limits, step=(step, other), reference=reference, before=last)

    step, other, least = canary.window(False), primary.window(False), step_least(limits)
    whole = step + canary.earlier, other + primary.earlier
    same = verdict(other, "same interval")
    if primary.earlier.requests < least:
        return same
    if sum(other.ttft.values()) < least <= sum(step.ttft.values()):  # it doesn't answer any more
        return verdict(primary.earlier, "earlier steps")
    if canary.users.requests <= primary.users.requests:
        return same
    return min(same, verdict(primary.earlier, "earlier steps"), key=lambda one: SEVERITY[one.outcome])


class Meter:
    """Reads the counters of some targets of a model; a target that doesn't answer keeps its last reading."""

    def __init__(self, counts: Counts, model: str) -> None:
        self._counts = counts
        self._model = model
        self._last: dict[str, Window] = {}
        self._probes: dict[str, Window] = {}

    async def read(self, peers: Sequence[Peer]) -> dict[str, Sample]:
        """Counters since the processes' starts, by target."""
        times = await asyncio.gather(*(self._times(peer) for peer in peers))
        return {
            peer.target: Sample(
                users=self._counts.window(self._model, [peer.target]) + window,
                probes=self._probes.get(peer.target, Window()),
            )
            for peer, window in zip(peers, times, strict=True)
        }

    async def _times(self, peer: Peer) -> Window:
        try:
            answer = msgspec.convert(await peer.get("/internal/window"), Buckets, strict=False)
            self._last[peer.target] = Window(ttft=answer.ttft, tpot=answer.tpot)
        except (Lost, Refused, msgspec.ValidationError) as error:
            log.warning("%s doesn't tell its times: %s", peer.target, error)
        return self._last.get(peer.target, Window())

    def count(self, peer: Peer, window: Window) -> None:
        """A probe's outcome."""
        self._probes[peer.target] = self._probes.get(peer.target, Window()) + window


def since(now: Mapping[str, Sample], then: Mapping[str, Sample]) -> Sample:
    """The sum over targets of what was counted between two readings; what wasn't there then began at 0."""
    total = Sample()
    for target, sample in now.items():
        start = then.get(target, Sample())
        total += Sample(
            users=sample.users - start.users, probes=sample.probes - start.probes, earlier=start.probes
        )
    return total


class Prober:
    """Sends the same prompts to all given workers at the same time, one at a time to each."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._turn = itertools.count()
        self._salt = os.urandom(4).hex()

    async def run(self, peers: Sequence[Peer], wanted: Callable[[], bool]) -> None:
        """As long as they are wanted; looks again a while later when they aren't."""
        while True:
            if wanted():
                turn = await self.once(peers)
                await asyncio.sleep(PROBE_PAUSE if turn < MANY_PROBES else 1.0)
            else:
                await asyncio.sleep(0.5)

    async def once(self, peers: Sequence[Peer]) -> int:
        """Returns how many rounds there were before."""
        turn = next(self._turn)
        prompt = tokens(PROBE_LENGTHS[turn % len(PROBE_LENGTHS)])
        await asyncio.gather(*(self._probe(peer, prompt, f"probe-{self._salt}-{turn}") for peer in peers))
        return turn

    async def _probe(self, peer: Peer, prompt: list[int], salt: str) -> None:
        try:
            times = await peer.timed(prompt, PROBE_TOKENS, salt)
        except Refused as error:
            if error.is_failure:
                self._meter.count(peer, Window(requests=1, errors=1))
            else:  # full, draining, or too small for it: says nothing about the version
                log.info("%s refused a probe: %s", peer.target, error)
                await asyncio.sleep(0.5)
        except Lost:
            self._meter.count(peer, Window(requests=1, errors=1))
        else:
            counted = Window(requests=1, ttft={bucket_of(times.ttft): 1}, tpot={bucket_of(times.tpot): 1})
            self._meter.count(peer, counted)
