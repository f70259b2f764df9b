"""The load of soaks, and who answers for each request that didn't end as it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.soak_worker import DONE, NUMBER, event
from tests.gateway.numbered_load import LONG, Asked, Ended, Load

_CODE = re.compile(r'"code": ?"(\w+)"')


def ask(number: int, user: str, rng: random.Random, model: str = "m") -> Asked:
    """Three in ten are streams of up to a third of a second, one in ten is long, the others are short."""
    share = rng.random()
    kind = "long" if share < 0.1 else "stream" if share < 0.4 else "short"
    body: dict[str, object] = {"model": model, "user": user, "number": number, "stream": kind == "stream"}
    if kind == "stream":
        events, pause = rng.randrange(2, 16), 0.02 * rng.random()
        return stream({**body, "events": events, "pause": pause})
    padding = "x" * LONG if kind == "long" else ""
    whole = json.dumps({**body, "wait": 0.03 * rng.random(), "padding": padding}).encode()
    return Asked(whole, whole.__eq__, kind=kind)


def stream(wanted: dict[str, Any]) -> Asked:
    """`events` of them, a `pause` of seconds after each; `first`: seconds until the first."""
    number = wanted["number"]
    expected = b"".join(event(number, place) for place in range(wanted["events"])) + DONE
    return Asked(json.dumps(wanted).encode(), expected.__eq__, kind="stream")


@dataclass(frozen=True)
class Kill:
    """A process that was killed, at time.monotonic's `at`. A gateway: `ports` of the clients that it was
    connected to. A worker: its `target`, "slot.generation"."""

    at: float
    ports: frozenset[int] = frozenset()
    target: str = ""


@contextlib.asynccontextmanager
async def loaded(load: Load) -> AsyncIterator[None]:
    """The load during the block; at its end what has begun is finished."""
    loading = asyncio.create_task(load.run())
    try:
        yield
    finally:
        load.stop()
        await loading


@dataclass(frozen=True)
class Account:
    """Where requests ended. `held`: how those ended that a process held when it was killed, by its role;
    `failures`: all others that didn't end as they should, in words; `repeated`: worked on twice, since the
    first worker was killed; `astray`: worked on twice or, though answered, never, and for no such reason."""

    by_kind: dict[str, int]
    held: dict[str, dict[str, int]]
    failures: list[str]
    repeated: int
    astray: list[int]

    def shown(self) -> dict[str, Any]:
        """For a result file."""
        whole = sum(self.by_kind.values())
        return {
            "requests": whole + len(self.failures) + sum(sum(held.values()) for held in self.held.values()),
            "whole": whole,
            "whole_by_kind": self.by_kind,
            "failed_with_a_killed_process": self.held,
            "failed_otherwise": len(self.failures),
            "first_of_those": self.failures[:20],
            "worked_on_again_after_a_kill": self.repeated,
            "worked_on_not_once": len(self.astray),
        }


def account(load: Load, kills: Iterable[Kill], worked: Path) -> Account:
    """Once the load is over. A connection that was cut excuses one request at most."""
    kills = list(kills)
    killed = {kill.target: kill.at for kill in kills if kill.target}
    cut = {(kill.at, port) for kill in kills for port in kill.ports}
    workers = worked_on(worked)
    held: dict[str, Counter[str]] = {"gateway": Counter(), "worker": Counter()}
    failures = []
    for one in sorted([*load.lost, *load.wrong.values()], key=lambda one: one.ended):
        connection = min(
            ((at, port) for at, port in cut if port == one.port and at <= one.ended), default=None
        )
        targets = {one.target, *workers.get(one.number, ())}
        if one.number not in load.wrong and connection is not None:
            cut.discard(connection)
            held["gateway"]["connection cut"] += 1
        elif any(_spans(one, killed[target]) for target in targets & killed.keys()):
            held["worker"][_code(one)] += 1
        else:
            failures.append(f"{one.number} ({one.kind}) of {one.target or 'nobody'}: {one.why}")
    again = {number: targets for number, targets in workers.items() if len(targets) > 1}
    repeated = {number for number, targets in again.items() if len(targets) == 2 and targets[0] in killed}
    astray = (again.keys() - repeated) | (load.whole.keys() - workers.keys())
    kinds = Counter(one.kind for one in load.whole.values())
    return Account(
        dict(kinds),
        {role: dict(codes) for role, codes in held.items()},
        failures,
        len(repeated),
        sorted(astray),
    )


def worked_on(folder: Path) -> dict[int, list[str]]:
    """Which workers worked on each request, killed ones included; who wrote last is last."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        for (number,) in NUMBER.iter_unpack(data[: len(data) // NUMBER.size * NUMBER.size]):
            found.setdefault(number, []).append(path.name)
    return found


def _spans(one: Ended, at: float) -> bool:
    """Whether it was under way then; a request that had just begun may have found the dead worker still in
    the routes."""
    return one.began - 1.0 <= at <= one.ended


def _code(one: Ended) -> str:
    """The error's, or the exception's name where the answer broke off."""
    found = _CODE.findall(one.why)
    return found[-1] if found else one.why.partition("(")[0]
