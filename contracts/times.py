"""How long requests took, counted in buckets: what a worker tells of them, and what a judge compares."""

from __future__ import annotations

import math

import msgspec

BUCKETS_PER_DOUBLING = 16
SHORTEST = 1e-5  # seconds; whatever is shorter counts as that


class Times(msgspec.Struct, frozen=True):
    """The answer to ``GET /internal/window`` of a worker: bucket → requests, since its start; they only grow.

    `ttft`: by the time from a request's arrival to its first token. `tpot`: by its mean time per further
    token, of requests that had any; over all its answers when it had several.
    """

    ttft: dict[int, int] = {}
    tpot: dict[int, int] = {}


def bucket_of(seconds: float) -> int:
    """The bucket that counts a time; its times are within 4.4 % of each other."""
    return math.floor(BUCKETS_PER_DOUBLING * math.log2(max(seconds, SHORTEST) / SHORTEST))


def seconds_of(bucket: float) -> float:
    """The middle of a bucket."""
    return float(SHORTEST * 2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING))
