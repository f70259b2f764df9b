"""kill -9 of supervisor, standby and primary, and `abort`, in every phase of a rollout, with real processes.

Each phase is held by a gate (tests/faults/nursery.py), so what is done to it is done in it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest

from gateway.cli.swap_client import SwapRefused
from gateway.fleet.rollout import Rollout
from tests.faults.nursery import Fleet, Nursery

# A phase, and what leads there: +GATE closes it, -GATE opens it, a phase waits for that, other words are
# commands. Then how the rollout ends when somebody is killed there (supervisor, standby, primary; "": not
# there just then), and when it is aborted.
Case = tuple[str, str, str, str, str, str]
BACK = "rolled_back"
DONE = "completed"
STOP = "aborted"
LATE = "refused"
CANARY: list[Case] = [
    ("starting", "+ready start", DONE, "failed", DONE, STOP),
    ("warming", "+warm start", BACK, BACK, DONE, STOP),
    ("proving", "+golden start", BACK, BACK, DONE, STOP),
    ("proven", "+ready start pause -ready", BACK, BACK, DONE, STOP),
    ("shifting", "+frozen start", BACK, BACK, DONE, STOP),
    ("judging", "start", BACK, BACK, DONE, STOP),
    ("clearing", "+inflight start full", BACK, BACK, DONE, STOP),
    ("draining", "+busy start full", DONE, DONE, DONE, LATE),
    ("cutting", "+busy hasty full", DONE, DONE, DONE, LATE),
    ("stopping", "+end start full", DONE, DONE, DONE, LATE),
    ("reverting", "start judging +frozen abort", STOP, STOP, STOP, STOP),
    ("clearing", "start judging +inflight abort", STOP, STOP, STOP, STOP),
    ("cutting", "hasty judging +busy abort", STOP, STOP, STOP, STOP),
    ("stopping", "start judging +end abort", STOP, STOP, STOP, STOP),
]
RECREATE: list[Case] = [
    ("holding", "+frozen start", DONE, "", DONE, STOP),
    ("clearing", "+inflight start", DONE, "", DONE, STOP),
    ("draining", "+busy start", DONE, "", DONE, STOP),
    ("cutting", "+busy hasty", DONE, "", DONE, STOP),
    ("stopping", "+end start", DONE, "", DONE, STOP),
    ("starting", "+ready start", DONE, BACK, "", STOP),
    ("warming", "+warm start", BACK, BACK, "", STOP),
    ("shifting", "+ready start starting +frozen -ready", BACK, BACK, "", STOP),
    ("judging", "start", BACK, BACK, "", STOP),
    ("holding", "start judging +frozen abort", STOP, STOP, "", STOP),
    ("clearing", "start judging +inflight abort", STOP, STOP, "", STOP),
    ("cutting", "hasty judging +busy abort", STOP, STOP, "", STOP),
    ("stopping", "start judging +end abort", STOP, STOP, "", STOP),
    ("restoring", "start judging +ready abort", STOP, "", STOP, STOP),
    ("reverting", "start judging +ready abort restoring +frozen -ready", STOP, "", STOP, STOP),
]
TO_THE_END = "clearing draining cutting stopping"
CASES = {"canary": CANARY, "recreate": RECREATE}


def lead(fleet: Fleet, strategy: str, way: str) -> None:
    for word in way.split():
        match word:
            case "start" | "hasty":
                limit = 0.0 if word == "hasty" else 900.0
                fleet.start(strategy=strategy, hold=60.0, probes=False, drain_limit=limit)
            case "full":
                fleet.swaps.command("m", "promote?full=1")
            case "abort" | "pause":
                fleet.swaps.command("m", word)
            case _ if word[0] == "+":
                fleet.close_gate(word[1:])
            case _ if word[0] == "-":
                fleet.open_gate(word[1:])
            case _:
                fleet.until_phase(word)


def end(fleet: Fleet) -> Rollout:
    """What is judged waits for users, of whom there are none, and what is paused waits: a person lets it go
    on."""
    waits = ("judging", "proven")
    fleet.until(lambda: fleet.rollout().terminal or fleet.rollout().phase in waits)
    with suppress(SwapRefused):  # it is over, or has begun to go back by itself
        fleet.swaps.command("m", "promote?full=1")
    return fleet.over()


def check(fleet: Fleet, ended: Rollout, expected: str, before: str, count: int) -> None:
    """One version is left, with all users, and is who it should be."""
    assert ended.phase == expected, (ended.reason, [entry.what for entry in ended.log])
    after = before if ended.phase != "completed" else other(before)
    fleet.until(lambda: fleet.workers() == {after: "ready"})
    routes = fleet.routes()
    assert [(one.slot, one.weight_bp) for one in routes.targets] == [(after, 10_000)]
    assert (routes.hold, routes.rollout_id) == (False, None)
    history = fleet.swaps.history("m")
    assert len(history) == count
    assert history[-1].outcome == ended.phase


def other(slot: str) -> str:
    return "m-0" if slot == "m-alt-0" else "m-alt-0"


def cases(canary: str = "", recreate: str = "") -> pytest.MarkDecorator:
    """A test for each phase, on the way there and back, or for those that are named."""
    chosen = [
        (strategy, case)
        for strategy, names in (("canary", canary), ("recreate", recreate))
        for case in CASES[strategy]
        if names == "all" or case[0] in names.split()
    ]
    ids = [f"{strategy}-{'back-' * ('abort' in case[1])}{case[0]}" for strategy, case in chosen]
    return pytest.mark.parametrize(("strategy", "case"), chosen, ids=ids)


class Home:
    """The fleet of one test after the other; another one where a test has left it in pieces."""

    def __init__(self, made: Nursery, folders: pytest.TempPathFactory) -> None:
        self._made = made
        self._folders = folders
        self.fleet: Fleet | None = None

    def living(self) -> Fleet:
        if self.fleet is None:
            self.fleet = Fleet(self._made, self._folders.mktemp("fleet"))
        self.fleet.until(partial(is_well, self.fleet))
        return self.fleet

    def leave(self) -> None:
        if self.fleet is not None and self.fleet.lives:
            self.fleet.kill()
        self.fleet = None


def is_well(fleet: Fleet) -> bool:
    return list(fleet.workers().values()) == ["ready"] and not list(fleet.gates.iterdir())


@pytest.fixture(scope="module")
def home(made: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(made, tmp_path_factory)
    yield home
    home.leave()


@pytest.fixture
def fleet(home: Home) -> Iterator[Fleet]:
    fleet = home.living()
    yield fleet
    if not fleet.lives or not is_well(fleet) or fleet.routes().rollout_id is not None:
        home.leave()


def there(fleet: Fleet, strategy: str, case: Case) -> tuple[str, int]:
    """In that phase. Which slot was the model's before, and how many rollouts there will be at the end."""
    (before,) = fleet.workers()
    count = len(fleet.swaps.history("m")) + 1
    lead(fleet, strategy, case[1])
    fleet.until_phase(case[0])
    return before, count


@cases("all", "all")
def test_the_supervisor_is_killed(fleet: Fleet, strategy: str, case: Case) -> None:
    before, count = there(fleet, strategy, case)
    fleet.kill()
    fleet.open_gates()
    fleet.up()
    ended = end(fleet)
    assert any("taken it up again" in entry.what for entry in ended.log)
    check(fleet, ended, case[2], before, count)


@cases("all", "starting shifting judging clearing")
def test_the_standby_is_killed(fleet: Fleet, strategy: str, case: Case) -> None:
    if case[3]:  # there is one
        kill_worker(fleet, strategy, case, "standby", case[3])


def test_the_standby_hangs(fleet: Fleet) -> None:
    """The old version isn't given up for one that does nothing any more."""
    before, count = there(fleet, "canary", next(case for case in CANARY if case[0] == "clearing"))
    os.kill(fleet.process(other(before)), signal.SIGSTOP)
    fleet.open_gates()
    time.sleep(1.0)  # the barrier is reached within a tenth of that
    assert fleet.rollout().phase == "clearing"
    fleet.kill_process(other(before))
    check(fleet, end(fleet), BACK, before, count)


@cases("judging clearing draining stopping reverting", "holding clearing restoring reverting")
def test_the_primary_is_killed(fleet: Fleet, strategy: str, case: Case) -> None:
    if case[4]:
        kill_worker(fleet, strategy, case, "primary", case[4])


def kill_worker(fleet: Fleet, strategy: str, case: Case, victim: str, expected: str) -> None:
    before, count = there(fleet, strategy, case)
    fleet.kill_process(before if victim == "primary" else other(before))
    fleet.open_gates()
    ended = end(fleet)
    check(fleet, ended, expected, before, count)
    assert sum("crashed" in entry.what for entry in ended.log) <= 1, [entry.what for entry in ended.log]


@cases("shifting clearing reverting", "holding")
def test_a_gateway_is_killed(fleet: Fleet, strategy: str, case: Case) -> None:
    """Where it is waited for: no longer, and what its successor shows counts."""
    before, count = there(fleet, strategy, case)
    fleet.kill_process("gateway")
    fleet.until(lambda: all(unit.state == "ready" for unit in fleet.units() if unit.role == "gateway"))
    fleet.open_gates()
    check(fleet, end(fleet), STOP if "abort" in case[1] else DONE, before, count)


@cases(
    "warming proving proven clearing draining cutting stopping", "holding clearing draining cutting stopping"
)
def test_it_is_aborted(fleet: Fleet, strategy: str, case: Case) -> None:
    if "abort" in case[1]:  # it is already
        return
    before, count = there(fleet, strategy, case)
    if case[5] == LATE:
        with pytest.raises(SwapRefused, match="too late") as refused:
            fleet.swaps.command("m", "abort")
        assert refused.value.exit_code == 6
    else:
        fleet.swaps.command("m", "abort")
    fleet.open_gates()
    check(fleet, end(fleet), DONE if case[5] == LATE else STOP, before, count)
