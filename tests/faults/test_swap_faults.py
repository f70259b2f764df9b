"""What else can happen to swaps: others at the same time, a full disk, Redis away, a clock that is set, what
was written down by somebody else. Real supervisors (tests/faults/nursery.py), each fault where it hurts."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from gateway.cli import reconfigure
from gateway.cli.swap_client import SwapRefused, Swaps
from gateway.config import FleetFile
from gateway.fleet.commands import Slot
from gateway.fleet.driver import driver as driving
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.driver.clock import clock_now, steady
from gateway.fleet.driver.records import Records
from gateway.fleet.driver.routes import RolloutStatus
from gateway.fleet.ledger import Ledger, Machine
from gateway.fleet.rollout import Options, Rollout, Version
from gateway.fleet.rollout.events import Promote
from gateway.fleet.rollout.model import Clock
from tests.faults.nursery import Fleet, Nursery
from tests.gateway.redis_server import RedisServer
from tests.gateway.swapping import PATIENCE, fleet_file, no_ledger, swapping, users

N = "  - {name: n, source: fake/ok, judge: {min_requests: 5}}\n"
STAYS: dict[str, Any] = {"hold": 60.0, "probes": False}


@pytest.fixture
def fleet(made: Nursery, tmp_path: Path) -> Iterator[Fleet]:
    """Of the models m and n."""
    fleet = Fleet(made, tmp_path, more=N)
    yield fleet
    fleet.kill()


def refused(ask: Any) -> SwapRefused:
    with pytest.raises(SwapRefused) as error:
        ask()
    return error.value


def start_at_once(fleet: Fleet, *models: str) -> list[Rollout | SwapRefused]:
    """Several people, each with a connection of his own; the ledger answers all of them late."""

    def start(model: str) -> Rollout | SwapRefused:
        options = Options(steps=(100.0,), **STAYS)
        try:
            return Swaps(fleet.state).start(model, StartRequest(source="fake/ok", options=options)).rollout
        except SwapRefused as error:
            return error

    fleet.close_gate("ledger")
    with ThreadPoolExecutor() as pool:
        answers: list[Future[Rollout | SwapRefused]] = [pool.submit(start, model) for model in models]
        time.sleep(0.5)  # both have asked
        fleet.open_gate("ledger")
        return [answer.result(PATIENCE) for answer in answers]


def test_two_swaps_are_not_promised_the_same_memory(fleet: Fleet) -> None:
    fleet.close_gate("room", "3")  # one more than there are workers
    answers = start_at_once(fleet, "m", "n")
    (begun,) = [one for one in answers if isinstance(one, Rollout)]
    (too_late,) = [one for one in answers if isinstance(one, SwapRefused)]
    assert (too_late.exit_code, "are 1 too many" in str(too_late)) == (5, True)
    fleet.swaps.command(begun.model, "abort")
    assert fleet.over(begun.model).phase == "aborted"

    answers = start_at_once(fleet, "m", "m", "m")  # and two of one model are one
    (begun,) = [one for one in answers if isinstance(one, Rollout)]
    others = [one for one in answers if isinstance(one, SwapRefused)]
    assert [one.exit_code for one in others] == [6, 6]
    assert fleet.rollout().id == begun.id
    fleet.until_phase("judging")
    assert set(fleet.workers()) == {"m-0", "m-alt-0", "n-0"}


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The slots that `config apply` has asked about, each time."""
    asked: list[set[str]] = []

    def make_ledger(fleet: FleetFile, machine: Machine, slots: Sequence[Slot]) -> Ledger:
        asked.append({slot.name for slot in slots})
        return no_ledger()

    monkeypatch.setattr(reconfigure, "make_ledger", make_ledger)
    return asked


@pytest.fixture
def apply(ledger: list[set[str]]) -> Any:
    def run(fleet: Fleet) -> Result:
        return CliRunner().invoke(pagefleet, ["config", "apply", str(fleet.path)])

    return run


def test_a_swap_and_config_apply_keep_out_of_each_others_way(
    fleet: Fleet, apply: Any, ledger: list[set[str]]
) -> None:
    file = fleet.path.read_text()
    fleet.close_gate("frozen")  # gateways don't take the new file yet
    fleet.path.write_text(file.replace("name: n,", "name: n, replicas: 2,").replace("[nick]", "[nick, also]"))
    with ThreadPoolExecutor() as pool:
        applied = pool.submit(apply, fleet)
        fleet.until(lambda: '"replicas": 2' in fleet.state.config.read_text())
        for model in ("m", "n"):
            error = refused(lambda model=model: fleet.start(model=model))
            assert (error.exit_code, "`config apply` is changing" in str(error)) == (6, True)
        fleet.open_gate("frozen")
        result = applied.result(PATIENCE)
    assert result.exit_code == 0, result.output
    assert fleet.workers() == {"m-0": "ready", "n-0": "ready", "n-1": "ready"}

    fleet.start("fake/new__ok", **STAYS)
    fleet.until_phase("judging")
    fleet.path.write_text(fleet.path.read_text().replace("replicas: 2,", "replicas: 3,"))
    result = apply(fleet)  # n alone changes
    assert result.exit_code == 0, result.output
    assert ledger[-1] == {"m-0", "m-alt-0", "n-0", "n-1", "n-2"}
    assert fleet.rollout().phase == "judging"
    os.kill(fleet.process("m-alt-0"), signal.SIGKILL)
    assert fleet.over().phase == "rolled_back"
    assert set(fleet.workers()) == {"m-0", "n-0", "n-1", "n-2"}


def test_what_a_younger_fleet_file_says_is_not_undone(fleet: Fleet) -> None:
    fleet.start("fake/new__ok", **STAYS)
    fleet.until_phase("judging")
    fleet.swaps.command("m", "promote?full=1")
    assert fleet.over().phase == "completed"
    fleet.down()
    fleet.path.write_text(fleet.path.read_text().replace("source: fake/ok", "source: fake/newest__ok", 1))
    fleet.up()
    error = refused(lambda: fleet.swaps.undo("m"))
    assert (error.exit_code, "m no longer runs what rollout" in str(error)) == (6, True)
    assert "m-0" in fleet.workers()


def test_undo_twice_is_where_one_began(fleet: Fleet) -> None:
    fleet.start("fake/new__ok", **STAYS)
    fleet.until_phase("judging")
    fleet.swaps.command("m", "promote?full=1")
    fleet.over()
    for source in ("fake/ok", "fake/new__ok"):
        undone = fleet.swaps.undo("m").rollout
        assert undone.new.source == source
        assert fleet.over().phase == "completed"
    status = fleet.status()
    assert status is not None
    assert status.versions["m"].source == "fake/new__ok"


def test_a_rollout_of_a_model_that_was_away_for_a_while_comes_to_its_end(fleet: Fleet, apply: Any) -> None:
    fleet.start(**STAYS)
    fleet.until_phase("judging")
    fleet.kill()
    file = fleet.path.read_text()
    fleet.path.write_text("\n".join(line for line in file.splitlines() if "name: m," not in line) + "\n")
    fleet.up()
    assert set(fleet.workers()) == {"n-0"}
    fleet.path.write_text(file)
    result = apply(fleet)
    assert result.exit_code == 0, result.output
    assert fleet.over().phase == "rolled_back"
    assert fleet.workers() == {"m-0": "ready", "n-0": "ready"}


@pytest.mark.parametrize("name", ["versions.json", "rollouts/m.json"])
def test_what_was_written_down_and_can_not_be_run_keeps_nobody_from_coming_up(
    fleet: Fleet, name: str
) -> None:
    fleet.start(**STAYS) if "rollouts" in name else complete(fleet)
    fleet.kill()
    path = fleet.state.root / name
    path.write_text(re.sub('"worker": ?{}', '"worker": {"nope": 1}', path.read_text(), count=1))
    assert "nope" in path.read_text()
    fleet.up()
    fleet.until(lambda: fleet.workers() == {"m-0": "ready", "n-0": "ready"})
    assert "a version of m from an earlier rollout can't be used" in fleet.said
    complete(fleet)


def complete(fleet: Fleet) -> None:
    fleet.start("fake/new__ok", **STAYS)
    fleet.until_phase("judging")
    fleet.swaps.command("m", "promote?full=1")
    assert fleet.over().phase == "completed"


def fill_disk(fleet: Fleet, full: bool) -> None:
    """No file of the supervisor, and of what it starts, may grow: as good as a full disk."""
    hard = resource.prlimit(fleet.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(fleet.pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def test_on_a_full_disk_nothing_begins_and_what_goes_on_waits_for_room(fleet: Fleet, apply: Any) -> None:
    fill_disk(fleet, True)
    file = fleet.path.read_text()
    fleet.path.write_text(file + N.replace("name: n", "name: more"))
    result = apply(fleet)
    assert (result.exit_code, "can't be written: File too large" in result.output) == (7, True), result.output
    assert set(fleet.workers()) == {"m-0", "n-0"}
    fleet.path.write_text(file)
    result = apply(fleet)
    assert "nothing to change" in result.output, "the failed one has changed something"
    error = refused(lambda: fleet.start(**STAYS))
    assert (error.exit_code, "the rollout's state can't be written" in str(error)) == (1, True)
    assert "there was no rollout" in str(refused(fleet.rollout))
    fill_disk(fleet, False)

    fleet.close_gate("warm")
    fleet.start(**STAYS)
    fleet.until_phase("warming")
    fill_disk(fleet, True)
    fleet.open_gate("warm")
    fleet.until_phase("proving")
    time.sleep(0.5)  # its golden prompts would be done by now
    assert fleet.rollout().phase == "proving", "what isn't on disk isn't done"
    fleet.swaps.command("m", "abort")
    time.sleep(0.3)
    assert fleet.workers()["m-alt-0"] == "ready"
    fill_disk(fleet, False)
    assert fleet.over().phase == "aborted"
    fleet.until(lambda: fleet.workers() == {"m-0": "ready", "n-0": "ready"})

    fleet.close_gate("end")
    fleet.start(**STAYS)
    fleet.until_phase("judging")
    fleet.swaps.command("m", "promote?full=1")
    fleet.until_phase("stopping")
    fill_disk(fleet, True)
    fleet.open_gate("end")
    fleet.until(lambda: "m-0" not in fleet.workers())
    time.sleep(0.3)
    fleet.kill()
    fleet.up()
    assert fleet.over().phase == "completed"
    assert [record.outcome for record in fleet.swaps.history("m")] == ["aborted", "completed"]


def test_a_supervisor_that_stands_still_is_not_said_to_be_gone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, apply: Any
) -> None:
    """Who hears that none is up starts another one."""
    for name in ("common", "swap_client"):
        monkeypatch.setattr(f"gateway.cli.{name}.PATIENCE", 0.5)
    place = ["--state-dir", str(fleet.state.root)]
    os.kill(fleet.pid, signal.SIGSTOP)
    silent = f"(process {fleet.pid}) doesn't answer"
    for words in ("status", "top", "swap status", "swap abort m", "chat m -p x"):
        result = CliRunner().invoke(pagefleet, [*words.split(), *place])
        assert (result.exit_code, silent in result.stderr) == (1, True), f"{words}: {result.output}"
    result = apply(fleet)
    assert (result.exit_code, silent in result.stderr) == (1, True), result.output
    result = CliRunner().invoke(pagefleet, ["up", str(fleet.path)])
    assert (result.exit_code, silent in result.stderr) == (6, True), result.output
    result = CliRunner().invoke(pagefleet, ["down", "--timeout", "1s", *place])
    assert (result.exit_code, f"`kill -9 {fleet.pid}`" in result.stderr) == (3, True), result.output


def test_who_watches_sees_the_end_also_when_the_supervisor_is_killed_in_between(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processes outlive it (systemd); else nothing is left to be watched."""
    monkeypatch.setattr(Swaps, "comes_back", True)
    watches = threading.Event()
    ask = Swaps.next

    def asks(swaps: Swaps, model: str, revision: int, seconds: float) -> RolloutStatus:
        watches.set()
        return ask(swaps, model, revision, seconds)

    monkeypatch.setattr(Swaps, "next", asks)
    fleet.close_gate("ready")
    fleet.start(**STAYS)
    words = ["swap", "watch", "m", "--state-dir", str(fleet.state.root)]
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(CliRunner().invoke, pagefleet, words)
        assert watches.wait(PATIENCE)
        fleet.kill()
        fleet.open_gates()
        fleet.up()
        fleet.until_phase("judging")
        fleet.swaps.command("m", "abort")
        result = watching.result(PATIENCE)
    assert (result.exit_code, "aborted: the standby is gone" in result.output) == (4, True), result.output


def test_a_fleet_that_goes_down_in_the_middle_takes_it_up_again(fleet: Fleet) -> None:
    """As after a crash: without a standby it goes back; users who wait get what they wait for."""
    fleet.start(**STAYS)
    fleet.until_phase("judging")
    fleet.down()
    fleet.up()
    assert fleet.over().phase == "rolled_back"

    fleet.close_gate("ready")
    fleet.start(strategy="recreate", **STAYS)
    fleet.until_phase("starting")
    fleet.close_gate("end")  # who runs takes a while to end
    os.kill(fleet.pid, signal.SIGTERM)
    fleet.until(lambda: "stopping" in fleet.workers().values())
    for ask in (lambda: fleet.start(model="n"), lambda: fleet.swaps.command("m", "abort")):
        error = refused(ask)
        assert (error.exit_code, "the fleet is ending" in str(error)) == (6, True)
    fleet.open_gates()
    fleet.until(lambda: not fleet.lives)
    fleet.up()
    fleet.until_phase("judging")
    assert [(one.slot, one.weight_bp) for one in fleet.routes().targets] == [("m-alt-0", 10_000)]


@pytest.mark.redis
def test_while_redis_is_away_nothing_advances_also_over_a_restart(made: Nursery, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    fleet = Fleet(made, tmp_path, more=N, gateway=f"redis_url: '{server.url}'")
    try:
        fleet.start(**STAYS)
        fleet.until_phase("judging")
        server.kill()
        fleet.until(lambda: fleet.rollout().suspended)
        assert refused(lambda: fleet.swaps.command("m", "promote?full=1")).exit_code == 7
        error = refused(lambda: fleet.start(model="n", strategy="recreate"))
        assert (error.exit_code, "users would wait" in str(error)) == (7, True)
        fleet.close_gate("golden")
        fleet.start(model="n", **STAYS)  # it may prepare
        fleet.until(lambda: fleet.rollout("n").phase == "proving" and fleet.rollout("n").suspended)
        fleet.open_gate("golden")
        fleet.until(lambda: fleet.rollout("n").phase == "proven")
        fleet.kill()
        fleet.up()
        fleet.over("n")
        fleet.over("m")
        fleet.close_gate("ready")
        fleet.start(**STAYS)
        fleet.until(lambda: fleet.rollout().suspended)
        fleet.kill()
        server.start()  # while nobody looks
        fleet.up()
        fleet.open_gate("ready")
        fleet.until_phase("judging")
        assert not fleet.rollout().suspended
    finally:
        server.kill()
        fleet.kill()


@pytest.mark.redis
async def test_users_notice_nothing_of_a_rollout_that_redis_holds_up(tmp_path: Path) -> None:
    """Real gateways, which count limits in Redis, or by themselves while it is away."""
    server = RedisServer(tmp_path / "redis").start()
    limits = "limits: {default: {concurrency: 1000}, on_redis_error: local}"
    path = fleet_file(tmp_path, gateway=f"redis_url: '{server.url}', {limits}")
    try:
        async with swapping(path) as fleet, users(fleet.supervisor.url) as load:
            await fleet.until(lambda: load.served)
            await fleet.start("fake/ok", steps=(50.0, 100.0), hold=60.0)
            await fleet.until_phase("judging")
            server.kill()
            await fleet.until(lambda: fleet.rollouts.status("m").suspended)
            served = sum(load.served.values())
            await fleet.until(lambda: sum(load.served.values()) > served + 30)
            server.start()
            await fleet.until(lambda: not fleet.rollouts.status("m").suspended)
            assert fleet.rollouts.status("m").phase == "judging"
            fleet.rollouts.command("m", Promote(full=True))
            assert (await fleet.over()).phase == "completed"
        assert load.failures == []
    finally:
        server.kill()


class _Idle:
    """Hands that do nothing."""

    async def carry_out(self, rollout: Rollout, actions: object) -> None: ...


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
@pytest.mark.parametrize("killed", [False, True])
async def test_no_stream_is_cut_because_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, killed: bool
) -> None:
    """While a supervisor looks, and while one has been killed and the next isn't there yet. Nor does it get
    more time by that."""
    monkeypatch.setattr(driving, "TICK", 0.02)
    began, now = time.monotonic(), time.time()
    rollout = Rollout(
        id="r", model="m", old=Version(source="old"), new=Version(source="new"), options=Options(),
        started=now, phase="clearing", leaving="primary", due=now + 2, primary_bp=0, standby_bp=10_000,
        clock=clock_now(),
    )  # fmt: skip

    def supervised() -> driving.Driver:
        return driving.Driver(
            rollout, lambda made: _Idle(), Records(tmp_path), lambda ended: None, lambda: frozenset()  # type: ignore[arg-type,return-value]
        )  # fmt: skip

    driver = supervised()
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    if killed:
        driver = supervised()
    running = asyncio.create_task(driver.run())
    async with asyncio.timeout(PATIENCE):
        while driver.rollout.phase != "cutting":
            assert driver.rollout.phase == "clearing"
            await asyncio.sleep(0.02)
    running.cancel()
    assert time.monotonic() > began + 1.9


def test_after_the_machine_has_booted_its_own_time_counts() -> None:
    assert steady(Clock("another", -1e9))() == pytest.approx(time.time(), abs=60)
