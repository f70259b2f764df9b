"""Times of requests, one count each, for whoever compares this version of the model with another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from contracts.times import Times, bucket_of
from worker.server.metrics import SequenceTimer


class TimesBook:
    """Since the process's start. The metrics' histograms count answers and are too coarse to compare by."""

    def __init__(self) -> None:
        self._ttft: Counter[int] = Counter()
        self._tpot: Counter[int] = Counter()

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it arrived."""
        self._ttft[bucket_of(seconds)] += 1

    def end(self, answers: Iterable[SequenceTimer]) -> None:
        """A request with these answers has ended, whichever way."""
        seconds, tokens = 0.0, 0
        for answer in answers:
            if answer.count > 1:
                seconds += answer.last - answer.first
                tokens += answer.count - 1
        if tokens:
            self._tpot[bucket_of(seconds / tokens)] += 1

    def times(self) -> Times:
        return Times(ttft=dict(self._ttft), tpot=dict(self._tpot))
