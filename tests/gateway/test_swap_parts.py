"""The parts of a swap by themselves: what is compared with what, what is kept, what runs after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.config import Judge, ModelEntry
from gateway.fleet.driver import driver as driving
from gateway.fleet.driver.measure import Sample, since, verdict_on
from gateway.fleet.driver.proof import matches
from gateway.fleet.driver.records import Records
from gateway.fleet.driver.redis_watch import watch
from gateway.fleet.driver.survival import primary_runs, standby_runs, standby_was_there
from gateway.fleet.judge import Window
from gateway.fleet.rollout import Options, Rollout, Version, record_of
from gateway.fleet.rollout import events as e
from gateway.fleet.versions import Running, Versions, file_version
from tests.gateway.redis_server import RedisServer

LIMITS = Judge(min_requests=10)
FAST, SLOW = 100, 200  # buckets; the second is 76 times the first


def window(count: int, bucket: int, errors: int = 0) -> Window:
    return Window(requests=count, errors=errors, ttft={bucket: count}, tpot={bucket: count})


def users(count: int, bucket: int = FAST, errors: int = 0) -> Sample:
    return Sample(users=window(count, bucket, errors))


def probes(count: int, bucket: int = FAST) -> Sample:
    """As they are counted: the workers have their times among the users'."""
    times = Window(ttft={bucket: count}, tpot={bucket: count})
    return Sample(users=times, probes=window(count, bucket))


def test_users_are_compared_with_users_and_probes_with_probes() -> None:
    verdict = verdict_on(users(50), users(50), Sample(), LIMITS, None)
    assert (verdict.outcome, verdict.reference) == ("pass", "same interval")
    # Few users with slow requests on the old version, and probes on both that are equally fast.
    verdict = verdict_on(probes(20), users(50, SLOW) + probes(20), Sample(), LIMITS, None)
    assert (verdict.outcome, verdict.measures[2].primary_samples) == ("pass", 20)
    verdict = verdict_on(users(50, SLOW) + probes(20), users(50) + probes(20), Sample(), LIMITS, None)
    assert verdict.outcome == "fail"


def test_errors_count_wherever_they_happen() -> None:
    verdict = verdict_on(users(5, errors=5) + probes(20), users(50), Sample(), LIMITS, None)
    assert (verdict.outcome, verdict.measures[1].canary_samples) == ("fail", 25)


def test_a_version_with_all_users_is_compared_with_the_time_before() -> None:
    before = users(500)
    verdict = verdict_on(users(50), Sample(), before, LIMITS, None)
    assert (verdict.outcome, verdict.reference) == ("pass", "before the rollout")
    assert verdict_on(users(50, SLOW), Sample(), before, LIMITS, None).outcome == "fail"
    assert verdict_on(users(50), Sample(), Sample(), LIMITS, None).outcome == "hold"


def test_times_of_an_earlier_rollouts_probes_are_no_users() -> None:
    life = Sample(users=Window(ttft={FAST: 300}, tpot={FAST: 300}))
    assert not life.by_users(LIMITS)


def test_an_interval_is_the_difference_of_two_readings() -> None:
    then, now = {"m-0.1": users(10)}, {"m-0.1": users(25), "m-1.1": users(5)}
    assert since(now, then).users == window(20, FAST)


@pytest.mark.parametrize(
    ("expect", "answer", "good"),
    [
        ("4", "It is 4.", True),
        ("four", "It is 4.", False),
        ("/[Ff]our|4/", "It is 4.", True),
        ("/^4/", "It is 4.", False),
        ("/a.b/", "a\nb", True),
        ("/", "1/2", True),
    ],
)
def test_a_golden_answer_is_a_substring_or_a_regular_expression(expect: str, answer: str, good: bool) -> None:
    assert matches(expect, answer) is good


def rollout(**changes: object) -> Rollout:
    made = Rollout(
        id="r1",
        model="org/m",
        old=Version(source="a"),
        new=Version(source="b"),
        options=Options(),
        started=1.0,
    )
    return msgspec.structs.replace(made, **changes)


def test_records_are_kept_once_and_a_torn_line_is_none(tmp_path: Path) -> None:
    records = Records(tmp_path / "rollouts")
    over = rollout(phase="completed", outcome="completed", ended=2.0)
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
    versions.record(entry, running)
    again = Versions(tmp_path / "versions.json")
    assert again.of(entry) == running
    assert again.of(entry.model_copy(update={"source": "o/c"})) is None
    assert again.last("m") == running
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
    one = rollout(**changes)
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
    one = rollout(phase=phase, leaving=leaving, options=Options(strategy="recreate"))
    assert (primary_runs(one), standby_runs(one), standby_was_there(one)) == (primary, False, lost)


@pytest.mark.redis
async def test_redis_is_watched(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    told: list[bool] = []
    try:
        async with watch(server.url, told.append):
            await asyncio.sleep(0.3)
            assert told == []
            server.kill()
            async with asyncio.timeout(30):
                while told != [True]:
                    await asyncio.sleep(0.05)
            server.start()
            async with asyncio.timeout(30):
                while told != [True, False]:
                    await asyncio.sleep(0.05)
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
