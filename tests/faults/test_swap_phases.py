"""kill -9 of supervisor, standby and primary, and `abort`, in every phase of a rollout, with real processes.

Each phase is held by a gate (tests/faults/nursery.py), so what is done to it is done in it.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from gateway.cli.swap_client import SwapRefused
from gateway.fleet.rollout import Rollout
from tests.faults.nursery import Fleet, Nursery

pytestmark = pytest.mark.timeout(300)

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
    if not fleet.rollout().terminal:
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


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def other(slot: str) -> str:
    return "m-0" if slot == "m-alt-0" else "m-alt-0"


@pytest.mark.parametrize("strategy", CASES)
def test_the_supervisor_is_killed(made: Nursery, tmp_path: Path, strategy: str) -> None:
    fleet = Fleet(made, tmp_path)
    for count, (phase, way, expected, *_) in enumerate(CASES[strategy], 1):
        (before,) = fleet.workers()
        lead(fleet, strategy, way)
        fleet.until_phase(phase)
        fleet.kill()
        fleet.open_gates()
        fleet.up()
        ended = end(fleet)
        assert any("taken it up again" in entry.what for entry in ended.log), (phase, way)
        check(fleet, ended, expected, before, count)
    fleet.down()


@pytest.mark.parametrize("victim", ["standby", "primary"])
@pytest.mark.parametrize("strategy", CASES)
def test_a_worker_is_killed(made: Nursery, tmp_path: Path, strategy: str, victim: str) -> None:
    fleet, count = Fleet(made, tmp_path), 0
    for phase, way, _, of_standby, of_primary, _ in CASES[strategy]:
        expected = of_standby if victim == "standby" else of_primary
        if not expected:
            continue
        count += 1
        fleet.until(lambda: list(fleet.workers().values()) == ["ready"])
        (before,) = fleet.workers()
        lead(fleet, strategy, way)
        fleet.until_phase(phase)
        pid = fleet.process(before if victim == "primary" else other(before))
        os.kill(pid, signal.SIGKILL)
        fleet.until(partial(gone, pid))
        fleet.open_gates()
        ended = end(fleet)
        check(fleet, ended, expected, before, count)
        assert sum("crashed" in entry.what for entry in ended.log) <= 1, [entry.what for entry in ended.log]
    fleet.down()


@pytest.mark.parametrize("strategy", CASES)
def test_it_is_aborted(made: Nursery, tmp_path: Path, strategy: str) -> None:
    fleet = Fleet(made, tmp_path)
    forward = [case for case in CASES[strategy] if "abort" not in case[1]]
    for count, (phase, way, *_, expected) in enumerate(forward, 1):
        (before,) = fleet.workers()
        lead(fleet, strategy, way)
        fleet.until_phase(phase)
        if expected == LATE:
            with pytest.raises(SwapRefused, match="too late") as refused:
                fleet.swaps.command("m", "abort")
            assert refused.value.exit_code == 6
        else:
            fleet.swaps.command("m", "abort")
        fleet.open_gates()
        check(fleet, end(fleet), DONE if expected == LATE else expected, before, count)
    fleet.down()
