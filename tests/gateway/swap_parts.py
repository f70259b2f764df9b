"""What tests of a swap's parts are given."""

from __future__ import annotations

import msgspec

from gateway.fleet.driver.measure import Sample
from gateway.fleet.judge import Window
from gateway.fleet.rollout import Options, Rollout, Version

FAST, SLOW = 100, 200  # buckets; the second is 76 times the first


def window(count: int, bucket: int, errors: int = 0) -> Window:
    return Window(requests=count, errors=errors, ttft={bucket: count}, tpot={bucket: count})


def users(count: int, bucket: int = FAST, errors: int = 0) -> Sample:
    return Sample(users=window(count, bucket, errors))


def some_rollout(**changes: object) -> Rollout:
    made = Rollout(
        id="r1",
        model="org/m",
        old=Version(source="a"),
        new=Version(source="b"),
        options=Options(),
        started=1.0,
    )
    return msgspec.structs.replace(made, **changes)
