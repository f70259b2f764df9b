"""Workers that die in the middle of a rollout: the new version's, one of several, one that dies again and
again, and one that the kernel kills for want of memory. Real processes, each killed where it hurts."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from gateway.fleet.rollout import Rollout
from gateway.fleet.rollout import events as e
from gateway.fleet.rollout.facts import UNSTEADY
from tests.control_group import memory_group
from tests.faults.nursery import Fleet, Nursery
from tests.gateway.numbered_load import Asked, Load
from tests.gateway.swapping import Swapping, fleet_file, swapping

PATH = "/v1/completions"


def ask(number: int, user: str, rng: random.Random) -> Asked:
    """Short answers and streams of half a second."""
    is_stream = number % 2 == 0
    fake = {"chunks": 10 if is_stream else 1, "delay": 0.05 * rng.random()}
    body = {"model": "m", "user": user, "stream": is_stream, "fake": fake}

    def answered_by(answer: bytes) -> bool:
        return answer.count(b"data: {") == 10 and b"[DONE]" in answer if is_stream else b"served_by" in answer

    return Asked(json.dumps(body).encode(), answered_by, PATH)


def pid_of(fleet: Swapping, slot: str) -> int:
    pid = next(unit.pid for unit in fleet.supervisor.statuses if unit.slot == slot)
    assert pid
    return pid


async def canary_at(fleet: Swapping, step: str) -> str:
    """Begins a rollout and brings it to that step. The new version's target."""
    await fleet.start("fake/ok", steps=(5.0, 50.0, 100.0), hold=60.0, probes=False)
    await fleet.until_phase("judging")
    if step == "50%":
        fleet.rollouts.command("m", e.Promote())
        await fleet.until(lambda: fleet.rollouts.status("m").phase == "judging")
    await fleet.until(lambda: step in fleet.rollouts.status("m").verdicts)
    return next(target.id for target in fleet.routes.targets if target.variant)


async def test_a_canary_that_is_killed_loses_what_it_held_and_nothing_else(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        old, place = pid_of(fleet, "m-0"), urlsplit(fleet.supervisor.url)
        load = Load(partial(asyncio.open_connection, place.hostname, place.port), ask, 30, pause=0.05)
        loading = asyncio.create_task(load.run())
        kills: dict[str, tuple[float, float]] = {}
        for step in ("5%", "50%", "5%", "50%"):
            canary = await canary_at(fleet, step)
            await fleet.until(partial(has_served, load, canary))
            victim = psutil.Process(pid_of(fleet, "m-alt-0"))
            killed = time.monotonic()
            victim.kill()
            await fleet.until(partial(is_gone, victim.pid))
            kills[canary] = killed, time.monotonic()
            rollout = await fleet.over()
            assert (rollout.phase, rollout.exit_code) == ("rolled_back", 4)
            assert rollout.reason.startswith("the standby crashed: m-alt-0 was killed (SIGKILL)")
            verdict = rollout.verdicts[step]
            assert (verdict.outcome, verdict.measures[0].canary) == ("fail", 1)
            assert fleet.rollouts.history("m")[-1].reason == rollout.reason
            assert (fleet.slots(), pid_of(fleet, "m-0")) == ({"m-0": "ready"}, old)
            enough = len(load.whole) + 30
            await fleet.until(partial(has_ended, load, enough))
        load.stop()
        await loading
    assert load.lost == []
    for one in load.wrong.values():
        assert one.target in kills, one
        killed, gone = kills[one.target]
        assert one.began <= gone, one
        assert killed <= one.ended, one
    assert len(load.whole) > 10 * len(load.wrong)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def has_served(load: Load, target: str) -> bool:
    return any(one.target == target for one in itertools.islice(reversed(load.whole.values()), 200))


def has_ended(load: Load, count: int) -> bool:
    return len(load.whole) > count


# --- one of several


@pytest.fixture
def pair(made: Nursery, tmp_path: Path) -> Iterator[Fleet]:
    """Two workers of the model."""
    fleet = Fleet(made, tmp_path, model="replicas: 2")
    fleet.until(lambda: fleet.workers() == {"m-0": "ready", "m-1": "ready"})
    yield fleet
    fleet.kill()


def promoted(fleet: Fleet) -> Rollout:
    fleet.swaps.command("m", "promote?full=1")
    return fleet.over()


OLD, NEW = {"m-0": "ready", "m-1": "ready"}, {"m-alt-0": "ready", "m-alt-1": "ready"}


def test_one_of_the_new_version_s_workers_dies_in_a_step(pair: Fleet) -> None:
    pair.start(steps=(50.0, 100.0), hold=60.0, probes=False)
    pair.until_phase("judging")
    pair.kill_process("m-alt-1")
    rollout = pair.over()
    assert (rollout.phase, "m-alt-1 was killed" in rollout.reason) == ("rolled_back", True)
    pair.until(lambda: pair.workers() == OLD)
    assert [target.restarts for target in pair.routes().targets] == [0, 0]


def test_one_of_the_old_version_s_workers_dies_in_a_step_and_when_it_leaves(pair: Fleet) -> None:
    pair.start(steps=(50.0, 100.0), hold=60.0, probes=False)
    pair.until_phase("judging")
    pair.kill_process("m-0")
    pair.until(lambda: pair.workers() == OLD | NEW)  # started again
    assert pair.rollout().phase == "judging"
    pair.until(lambda: {one.generation for one in pair.routes().targets if not one.variant} == {1, 2})
    pair.close_gate("inflight")
    pair.swaps.command("m", "promote?full=1")
    pair.until_phase("clearing")
    pair.kill_process("m-1")
    assert pair.rollout().phase == "clearing", "the other one may still have a request"
    pair.open_gate("inflight")
    assert pair.over().phase == "completed"
    pair.until(lambda: pair.workers() == NEW)


def test_a_worker_that_dies_while_the_other_one_drains_is_not_waited_for(pair: Fleet) -> None:
    for way_back in (False, True):
        before = pair.workers()
        pair.start(steps=(100.0,), hold=60.0, probes=False)
        pair.until_phase("judging")
        pair.close_gate("busy")
        pair.swaps.command("m", "abort" if way_back else "promote?full=1")
        pair.until_phase("draining")
        slots = sorted(set(pair.workers()) - set(before)) if way_back else sorted(before)
        pair.kill_process(slots[0])
        time.sleep(0.5)
        assert pair.rollout().phase == "draining", "the other one has a request"
        pair.open_gate("busy")
        assert pair.over().phase == ("aborted" if way_back else "completed")
        pair.until(lambda: pair.workers() == NEW)


def test_a_worker_that_is_still_loading_has_nobody_to_wait_for(pair: Fleet) -> None:
    """One of the old version that is started again, perhaps for minutes, when the old version leaves."""
    pair.start(steps=(100.0,), hold=60.0, probes=False)
    pair.until_phase("judging")
    pair.close_gate("ready")
    pair.kill_process("m-1")
    pair.until(lambda: pair.workers()["m-1"] == "starting")
    pair.close_gate("busy")  # nor has what it says about itself
    pair.kill_process("m-0")
    pair.until(lambda: pair.workers()["m-0"] == "starting")
    assert promoted(pair).phase == "completed"
    assert pair.workers() == NEW


# --- again and again


@pytest.mark.parametrize("steps", [(50.0, 100.0), (100.0,)], ids=["beside", "alone"])
def test_an_old_version_that_crashes_again_and_again_keeps_no_step_from_its_end(
    made: Nursery, tmp_path: Path, steps: tuple[float, ...]
) -> None:
    fleet = Fleet(made, tmp_path)
    try:
        alone = len(steps) == 1
        fleet.start(steps=steps, hold=3.0 if alone else 60.0)
        fleet.until_phase("judging")
        for _ in range(UNSTEADY + 2):
            fleet.until(lambda: fleet.workers().get("m-0") == "ready" or fleet.rollout().terminal)
            if fleet.rollout().terminal:
                break
            fleet.kill_if_there("m-0")
        if alone:  # users are on the new one, and it is as good as the old one was
            assert fleet.over().phase == "completed"
            return
        fleet.until(lambda: any("no measure" in one.reason for one in fleet.rollout().verdicts.values()))
        rollout = fleet.rollout()
        assert (rollout.phase, rollout.verdicts["50%"].outcome) == ("judging", "hold")
        due = rollout.due
        kill_when_ready(fleet)
        assert fleet.rollout().due == due, "not begun once more"
        assert promoted(fleet).phase == "completed"
    finally:
        fleet.kill()


def kill_when_ready(fleet: Fleet) -> None:
    fleet.until(lambda: fleet.workers()["m-0"] == "ready")
    fleet.kill_process("m-0")


# --- for want of memory


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group in which the kernel ends who takes over 64 MiB."""
    with memory_group(64 << 20) as group:
        yield group


@pytest.mark.parametrize("when", ["starting", "judging"])
def test_a_standby_that_the_kernel_ends_for_want_of_memory(
    made: Nursery, tmp_path: Path, limited: Path, when: str
) -> None:
    fleet = Fleet(made, tmp_path)
    try:
        fleet.until(lambda: fleet.workers() == {"m-0": "ready"})
        old = fleet.process("m-0")
        if when == "starting":
            fleet.close_gate("ready")
        fleet.close_gate("meal")
        fleet.start("fake/hungry", hold=60.0, probes=False)
        fleet.until_phase(when)
        fleet.until(lambda: any(unit.slot == "m-alt-0" and unit.pid for unit in fleet.units()))
        (limited / "cgroup.procs").write_text(str(fleet.process("m-alt-0")))
        fleet.open_gate("meal")
        rollout = fleet.over()
        killed = "m-alt-0 was killed (SIGKILL); just then the kernel ended a process for want of memory"
        assert rollout.reason.endswith(killed)
        assert (rollout.phase, rollout.exit_code) == (
            ("failed", 1) if when == "starting" else ("rolled_back", 4)
        )
        assert (fleet.workers(), fleet.process("m-0")) == ({"m-0": "ready"}, old)
        assert fleet.swaps.history("m")[-1].reason == rollout.reason
    finally:
        fleet.kill()
