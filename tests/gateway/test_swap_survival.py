"""What a swap keeps, what runs after a crash, and what is seen to however much happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.fleet.driver import driver as driving
from gateway.fleet.driver.records import Records
from gateway.fleet.driver.redis_watch import watch
from gateway.fleet.driver.survival import primary_runs, standby_runs, standby_was_there
from gateway.fleet.rollout import Options, Rollout, Version, record_of
from gateway.fleet.rollout import events as e
from gateway.fleet.versions import Running, Versions, file_version
from gateway.settings import ModelEntry
from tests.gateway.redis_server import RedisServer
from tests.gateway.swap_parts import some_rollout, users


def test_records_are_kept_once_and_a_torn_line_is_none(tmp_path: Path) -> None:
    records = Records(tmp_path / "rollouts")
    over = some_rollout(phase="completed", outcome="completed", ended=2.0)
    records.save(over)
    assert list(records.rollouts()) == [over]
    records.append(record_of(over))
    records.append(record_of(over))
    (history,) = (tmp_path / "rollouts").glob("*.jsonl")
    with history.open("ab") as file:
        file.write(b'{"id": "half')
    later = msgspec.structs.replace(over, id="r2")
    records.append(record_of(later))
    assert [record.id for record in records.history("org/m")] == ["r1", "r2"]
    assert records.history("org-m") == []  # a name that looks alike in a file's name
    records.save_before(over, users(3))
    assert records.before(over) == users(3)
    assert records.before(later) is None
    assert list(records.rollouts()) == [over]
    (state,) = [path for path in (tmp_path / "rollouts").glob("*.json") if "before" not in path.name]
    state.write_bytes(b"{}")
    assert list(records.rollouts()) == []


def test_the_version_of_a_rollout_holds_until_the_file_says_something_new(tmp_path: Path) -> None:
    entry = ModelEntry.model_validate({"name": "m", "source": "o/a", "worker": {"gpus": [0]}})
    versions = Versions(tmp_path / "versions.json")
    new = Version(source="o/b", worker={"max_num_seqs": 8})
    running = Running(version=new, variant="b", rollout_id="r", since=1.0, file=file_version(entry))
    versions.record({entry.name: running})
    again = Versions(tmp_path / "versions.json")
    assert again.of(entry) == running
    assert again.of(entry.model_copy(update={"source": "o/c"})) is None
    assert again.last("m") == running
    words = again.in_words(entry, running)
    assert words.startswith("m runs o/b since rollout r, not what the fleet file says; ")
    assert f"take {tmp_path / 'versions.json'} away" in words
    (tmp_path / "versions.json").write_text("nonsense")
    assert Versions(tmp_path / "versions.json").of(entry) is None


@pytest.mark.parametrize(
    ("changes", "primary", "standby", "lost"),
    [
        ({"phase": "starting"}, True, False, False),
        ({"phase": "proving"}, True, False, True),
        ({"phase": "judging", "standby_bp": 500}, True, False, True),
        ({"phase": "clearing", "leaving": "primary"}, True, False, True),
        ({"phase": "draining", "leaving": "primary"}, False, True, False),
        ({"phase": "stopping", "leaving": "primary"}, False, True, False),
        ({"phase": "stopping", "leaving": "standby", "outcome": "aborted"}, True, False, True),
    ],
)
def test_what_runs_after_a_crash(
    changes: dict[str, object], primary: bool, standby: bool, lost: bool
) -> None:
    one = some_rollout(**changes)
    assert (primary_runs(one), standby_runs(one), standby_was_there(one)) == (primary, standby, lost)


@pytest.mark.parametrize(
    ("phase", "leaving", "primary", "lost"),
    [
        ("holding", "primary", True, False),
        ("draining", "primary", False, False),
        ("starting", None, False, False),
        ("judging", None, False, True),
        ("clearing", "standby", False, True),
        ("restoring", None, False, False),
        ("reverting", None, True, False),
    ],
)
def test_what_runs_after_a_crash_of_recreate(
    phase: str, leaving: str | None, primary: bool, lost: bool
) -> None:
    one = some_rollout(phase=phase, leaving=leaving, options=Options(strategy="recreate"))
    assert (primary_runs(one), standby_runs(one), standby_was_there(one)) == (primary, False, lost)


@pytest.mark.redis
async def test_redis_is_watched(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    told: list[bool] = []

    async def until(expected: list[bool]) -> None:
        async with asyncio.timeout(30):
            while told != expected:
                await asyncio.sleep(0.05)

    try:
        async with watch(server.url, told.append):
            await until([False])  # an earlier supervisor may have found it down
            server.kill()
            await until([False, True])
            server.start()
            await until([False, True, False])
    finally:
        server.kill()


class _Idle:
    """Hands that do nothing."""

    async def carry_out(self, rollout: Rollout, actions: object) -> None: ...


async def test_time_passes_however_much_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost gateways, time limits and a full disk are seen to on ticks; facts must not keep them away."""
    monkeypatch.setattr(driving, "TICK", 0.05)
    looks = 0

    def living() -> frozenset[str]:
        nonlocal looks
        looks += 1
        return frozenset()

    old, new = Version(source="old"), Version(source="new")
    rollout = Rollout(id="r", model="m", old=old, new=new, options=Options(), started=0.0, phase="judging")
    driver = driving.Driver(rollout, lambda made: _Idle(), Records(tmp_path), lambda ended: None, living)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(driver.run())

    async def chatter() -> None:
        while looks < 3:
            driver.report(e.Applied(rollout_id="r", change=99))  # stale
            await asyncio.sleep(0.005)

    try:
        await asyncio.wait_for(chatter(), 20)
    finally:
        running.cancel()
