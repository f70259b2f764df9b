"""What two versions of a model do, over one interval: the numbers that the judge compares.

Requests and errors are the gateways' (their boards), times are the workers' (`GET /internal/window`): both
only grow, so an interval is the difference of two readings. Times of the driver's own probes it has taken by
itself (gateway/fleet/driver/probing.py). Users' requests count by step, since a version's load changes with
its share of the users. Probes go straight to the workers, so those of a rollout's earlier steps count on.
They are forgotten with the supervisor's process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from contracts.times import Times as Buckets
from gateway.fleet.driver.peer import Lost, Peer, Refused
from gateway.fleet.judge import Limits, Window

log = logging.getLogger(__name__)


class Counts(Protocol):
    """The part of gateway.fleet.observer.Observer that counts."""

    def window(self, model: str, targets: Collection[str]) -> Window: ...
    def inflight(self, model: str, targets: Collection[str]) -> int: ...
    def traffic(self) -> tuple[int, int]: ...


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """`every` one of them; `even`: the times of those beside which the new version had no more users'
    requests to do than the old one."""

    every: Window = Window()
    even: Window = Window()

    def __add__(self, other: Probes) -> Probes:
        return Probes(every=self.every + other.every, even=self.even + other.even)

    def __sub__(self, other: Probes) -> Probes:
        return Probes(every=self.every - other.every, even=self.even - other.even)

    def seen(self, even: bool) -> Window:
        """All requests and errors, and the times of all or of the even ones."""
        times = self.even if even else self.every
        return Window(
            requests=self.every.requests, errors=self.every.errors, ttft=times.ttft, tpot=times.tpot
        )


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one version did: for users (with the probes' times in it, which the workers don't tell apart), and
    for probes alone; `earlier`: for probes of the steps before."""

    users: Window = Window()
    probes: Probes = Probes()
    earlier: Probes = Probes()

    def __add__(self, other: Sample) -> Sample:
        return Sample(
            users=self.users + other.users,
            probes=self.probes + other.probes,
            earlier=self.earlier + other.earlier,
        )

    def has_users(self, limits: Limits) -> bool:
        """Whether there are enough to be judged by. Their number is the gateways': the workers' times hold
        probes, too, also those of an earlier rollout."""
        times = min(sum(self.users.ttft.values()), sum(self.users.tpot.values()))
        return min(self.users.requests, times - self.probes.every.requests) >= limits.min_requests

    def by_users(self) -> Window:
        """All requests and errors, and users' times."""
        counts = self.by_probes()
        return msgspec.structs.replace(counts, ttft=self.users.ttft, tpot=self.users.tpot)

    def by_probes(self, even: bool = False) -> Window:
        """All requests and errors, and probes' times."""
        counts = Window(requests=self.users.requests, errors=self.users.errors)
        return counts + self.probes.seen(even)


def since(now: Mapping[str, Sample], then: Mapping[str, Sample]) -> Sample:
    """The sum over targets of what was counted between two readings; what wasn't there then began at 0."""
    total = Sample()
    for target, sample in now.items():
        start = then.get(target, Sample())
        total += Sample(
            users=sample.users - start.users, probes=sample.probes - start.probes, earlier=start.probes
        )
    return total


class Meter:
    """Reads the counters of some targets of a model; a target that doesn't answer keeps its last reading."""

    def __init__(self, counts: Counts, model: str) -> None:
        self._counts = counts
        self._model = model
        self._last: dict[str, Window] = {}
        self._probes: dict[str, Probes] = {}

    async def read(self, peers: Sequence[Peer], gone: Iterable[str] = ()) -> dict[str, Sample]:
        """Counters since the processes' starts, by target. `gone`: targets that can't be asked any more."""
        await asyncio.gather(*(self._ask(peer) for peer in peers))
        return {
            target: Sample(
                users=self._counts.window(self._model, [target]) + self._last.get(target, Window()),
                probes=self._probes.get(target, Probes()),
            )
            for target in (*(peer.target for peer in peers), *gone)
        }

    async def _ask(self, peer: Peer) -> None:
        try:
            answer = msgspec.convert(await peer.get("/internal/window"), Buckets, strict=False)
            self._last[peer.target] = Window(ttft=answer.ttft, tpot=answer.tpot)
        except (Lost, Refused, msgspec.ValidationError) as error:
            log.warning("%s doesn't tell its times: %s", peer.target, error)

    def users(self, peers: Sequence[Peer]) -> tuple[int, int]:
        """Requests of users: how many have ended there, and how many are in flight."""
        targets = [peer.target for peer in peers]
        counts = self._counts
        return counts.window(self._model, targets).requests, counts.inflight(self._model, targets)

    def traffic(self) -> tuple[int, int]:
        """The same of all models together."""
        return self._counts.traffic()

    def count(self, peer: Peer, probe: Window, *, even: bool) -> None:
        """A probe's outcome."""
        counted = Probes(every=probe, even=Window(ttft=probe.ttft, tpot=probe.tpot) if even else Window())
        self._probes[peer.target] = self._probes.get(peer.target, Probes()) + counted
