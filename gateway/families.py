"""Counters, histograms and gauges on boards, and the sums over all of a fleet's gateway processes.

Whoever counts calls `inc` or `observe` with the values of the labels: one look-up and one addition. Rendering
is the Prometheus client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import isnan, nan

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.board import Board, Reading

Labels = tuple[str, ...]
Found = dict[Labels, list[Sequence[float]]]  # one entry a process that has these labels
Combine = Callable[[Iterable[float]], float]


class Counter:
    """Only grows, over restarts of a process too. `name` ends in `_total`."""

    def __init__(self, board: Board, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self._text = text
        self._label_names = labels
        self._board = board
        self._numbers: dict[Labels, memoryview[float]] = {}

    def inc(self, labels: Labels = (), by: float = 1.0) -> None:
        (self._numbers.get(labels) or self.numbers(labels))[0] += by

    def numbers(self, labels: Labels) -> memoryview[float]:
        """The one number of these labels, for who adds to it often."""
        numbers = self._numbers.get(labels)
        if numbers is None:
            numbers = self._numbers[labels] = self._board.numbers((self.name, *labels))
        return numbers

    def collect(self, found: Found) -> Metric:
        family = CounterMetricFamily(self.name, self._text, labels=self._label_names)
        for labels, processes in found.items():
            family.add_metric(labels, sum(numbers[0] for numbers in processes))
        return family


class Histogram:
    """`buckets`: upper bounds, ascending, without the infinite one."""

    def __init__(
        self, board: Board, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self.name = name
        self._text = text
        self._label_names = labels
        self.bounds = tuple(buckets)
        self._board = board
        self._numbers: dict[Labels, memoryview[float]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        numbers = self.numbers(labels)
        numbers[bisect_left(self.bounds, value)] += 1
        numbers[-1] += value

    def numbers(self, labels: Labels) -> memoryview[float]:
        """The buckets of these labels, each with what fell into it alone, and the sum of all values."""
        numbers = self._numbers.get(labels)
        if numbers is None:
            size = len(self.bounds) + 2
            numbers = self._numbers[labels] = self._board.numbers((self.name, *labels), size)
        return numbers

    def collect(self, found: Found) -> Metric:
        family = HistogramMetricFamily(self.name, self._text, labels=self._label_names)
        size = len(self.bounds) + 2
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        for labels, processes in found.items():
            sums = [sum(column) for column in zip(*(n for n in processes if len(n) == size), strict=True)]
            if sums:
                family.add_metric(labels, list(zip(names, accumulate(sums[:-1]))), sums[-1])
        return family


class Gauge:
    """What `read` says now, as (labels, value) pairs; `combine` makes one value of those of all living
    processes."""

    def __init__(
        self,
        board: Board,
        name: str,
        text: str,
        labels: Sequence[str],
        combine: Combine,
        read: Callable[[], Iterable[tuple[Labels, float]]],
    ) -> None:
        self.name = name
        self._text = text
        self._label_names = labels
        self._combine = combine
        self._board = board
        self._read = read
        # What a predecessor left is no longer so.
        self._numbers: dict[Labels, memoryview[float]] = {
            key[1:]: board.numbers(key) for key in board.read().numbers if key[0] == name
        }
        for numbers in self._numbers.values():
            numbers[0] = nan

    def publish(self) -> None:
        """Puts the present values on the board; labels that `read` no longer gives go away."""
        gone = set(self._numbers)
        for labels, value in self._read():
            numbers = self._numbers.get(labels)
            if numbers is None:
                numbers = self._numbers[labels] = self._board.numbers((self.name, *labels))
            numbers[0] = value
            gone.discard(labels)
        for labels in gone:
            self._numbers.pop(labels)[0] = nan

    def collect(self, found: Found) -> Metric:
        family = GaugeMetricFamily(self.name, self._text, labels=self._label_names)
        for labels, processes in found.items():
            values = [numbers[0] for numbers in processes if not isnan(numbers[0])]
            if values:
                family.add_metric(labels, self._combine(values))
        return family


Family = Counter | Histogram | Gauge


class Families(Collector):
    """Everything on the boards that `read` gives, as the Prometheus client's registries want it.

    Gauges are those of living processes; what a dead one counted still counts.
    """

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._families: list[Family] = []
        self._read = read

    def add(self, *families: Family) -> None:
        self._families += families

    def collect(self) -> Iterator[Metric]:
        everything: dict[str, Found] = {}
        living: dict[str, Found] = {}
        for board in self._read():
            for (name, *labels), numbers in board.numbers.items():
                everything.setdefault(name, {}).setdefault(tuple(labels), []).append(numbers)
                if board.alive:
                    living.setdefault(name, {}).setdefault(tuple(labels), []).append(numbers)
        for family in self._families:
            boards = living if isinstance(family, Gauge) else everything
            yield family.collect(boards.get(family.name, {}))
