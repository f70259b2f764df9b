"""What a fleet's gateways show on their boards, as a rollout needs it: the barrier, and the judge's counts.

The barrier is two questions in this order: `applied(epoch)`, then `inflight` of targets that have no weight
in that epoch. When a gateway puts new routes into use, it shows first what is in flight and then the epoch,
in the step in which the new routes begin to decide. From then on nothing is added on those targets, so what
it shows later can only be too much. A gateway that doesn't live (its process is gone, or was paused for
gateway.board.FRESH_SECONDS) isn't waited for: before it claims anything again it reads the routes anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from gateway.board import (
    CONFIG,
    INFLIGHT,
    QUEUE_WAITING,
    ROUTE_EPOCH,
    TARGET_ERRORS,
    TARGET_REQUESTS,
    Key,
    Peer,
    Reading,
)
from gateway.fleet.judge import Window


class Observer:
    """Reads `boards`: the file of each gateway's slot. Targets are named by id, "slot.generation"."""

    def __init__(self, boards: Mapping[str, Path]) -> None:
        self._peers = {slot: Peer(path) for slot, path in boards.items()}

    def living(self) -> frozenset[str]:
        """The slots whose gateway serves, or still finishes what it has."""
        return frozenset(slot for slot, reading in self._readings() if reading.alive)

    def applied(self, epoch: int) -> bool:
        """Whether every living gateway, and one at least, routes by a file of that epoch or a later one."""
        epochs = [_number(reading, (ROUTE_EPOCH,), -1.0) for reading in self._living()]
        return bool(epochs) and min(epochs) >= epoch

    def latest_epoch(self) -> int:
        """The latest that any gateway has ever shown, also one that is gone."""
        return round(max((_number(one, (ROUTE_EPOCH,), 0.0) for _, one in self._readings()), default=0.0))

    def inflight(self, model: str, targets: Collection[str]) -> int:
        """Requests of all living gateways on these targets, as of their last sign of life."""
        return _sum(self._living(), INFLIGHT, model, targets)

    def waiting(self, model: str) -> int:
        """Requests that wait in living gateways for a worker of the model, as of their last sign of life."""
        key = (QUEUE_WAITING, model)
        return round(sum(_number(reading, key, 0.0) for reading in self._living()))

    def not_following(self, digest: int) -> frozenset[str]:
        """The slots of living gateways that don't follow the fleet file with this digest yet."""
        alive = [(slot, reading) for slot, reading in self._readings() if reading.alive]
        return frozenset(slot for slot, reading in alive if _number(reading, (CONFIG,), -1.0) != digest)

    def window(self, model: str, targets: Collection[str]) -> Window:
        """Requests and errors on these targets, also those of gateways that are gone. They only grow."""
        readings = [reading for _, reading in self._readings()]
        return Window(
            requests=_sum(readings, TARGET_REQUESTS, model, targets),
            errors=_sum(readings, TARGET_ERRORS, model, targets),
        )

    def traffic(self) -> tuple[int, int]:
        """Of all models: requests that have ended on workers, and those that are in flight there."""
        readings = [reading for _, reading in self._readings()]
        ended = sum(_total(reading, TARGET_REQUESTS) for reading in readings)
        return ended, sum(_total(reading, INFLIGHT) for reading in readings if reading.alive)

    def _living(self) -> list[Reading]:
        return [reading for _, reading in self._readings() if reading.alive]

    def _readings(self) -> Iterator[tuple[str, Reading]]:
        for slot, peer in self._peers.items():
            reading = peer.read()
            if reading is not None:
                yield slot, reading


def _sum(readings: Collection[Reading], name: str, model: str, targets: Collection[str]) -> int:
    keys = [(name, model, target) for target in targets]
    return round(sum(_number(reading, key, 0.0) for reading in readings for key in keys))


def _total(reading: Reading, name: str) -> int:
    values = [value for key, (value, *_) in reading.numbers.items() if key[0] == name]
    return round(sum(value for value in values if not math.isnan(value)))


def _number(reading: Reading, key: Key, missing: float) -> float:
    """NaN is what a gauge shows that has no value now."""
    found = reading.numbers.get(key)
    return missing if found is None or math.isnan(found[0]) else found[0]
