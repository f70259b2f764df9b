"""Swaps as the supervisor carries them out: real gateways, fake models, users who must not notice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from gateway.config import load_fleet
from gateway.fleet.driver.asked import StartRequest, SwapError
from gateway.fleet.ledger import make_ledger
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.rollout import Options, Rollout, Version
from gateway.fleet.rollout import events as e
from tests.gateway.swapping import PATIENCE, Swapping, fleet_file, swapping, users

pytestmark = pytest.mark.timeout(240)


def pid_of(fleet: Swapping, slot: str) -> int:
    return next(unit.pid or 0 for unit in fleet.supervisor.statuses if unit.slot == slot)


def untouched(fleet: Swapping, pid: int) -> None:
    """The old version has everything, as if nothing had been."""
    assert fleet.slots() == {"m-0": "ready"}
    assert pid_of(fleet, "m-0") == pid
    assert [(t.id, t.weight_bp, t.state) for t in fleet.routes.targets] == [("m-0.1", 10_000, "ready")]
    assert (fleet.routes.hold, fleet.routes.rollout_id) == (False, None)


async def test_users_do_not_notice_and_the_new_version_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fleet_file(tmp_path, "replicas: 2")
    async with swapping(path) as fleet:
        old = [pid_of(fleet, slot) for slot in ("m-0", "m-1")]
        async with users(fleet.supervisor.url) as load:
            await fleet.until(lambda: sum(load.served.values()) > 20)
            assert set(load.served) == {"m-0.1", "m-1.1"}
            begun = await fleet.start("fake/new__ok", steps=(10.0, 50.0, 100.0))
            with pytest.raises(SwapError, match=f"rollout {begun.id} of m is under way") as refused:
                await fleet.start("fake/other")
            assert refused.value.exit_code == 6
            rollout = await fleet.over()
            load.served.clear()
            await fleet.until(lambda: sum(load.served.values()) > 20)
        assert load.failures == []
        assert set(load.served) <= {"m-alt-0.1", "m-alt-1.1"}
        assert (rollout.phase, rollout.exit_code, rollout.cut) == ("completed", 0, 0)
        assert {name: verdict.outcome for name, verdict in rollout.verdicts.items()} == dict.fromkeys(
            ("10%", "50%", "100%"), "pass"
        )
        phases = [entry.phase for entry in rollout.log]
        assert phases[:6] == ["starting", "checking", "warming", "proving", "proven", "shifting"]
        assert phases[-4:] == ["clearing", "draining", "stopping", "completed"]
        assert fleet.slots() == {"m-alt-0": "ready", "m-alt-1": "ready"}
        assert not any(psutil.pid_exists(pid) for pid in old)
        assert fleet.rollouts.models.changed_versions()["m"].source == "fake/new__ok"

    assert "not what the fleet file says" not in caplog.text
    async with swapping(path) as fleet:  # it is the model's version now
        assert f"m runs fake/new__ok since rollout {begun.id}, not what the fleet file says" in caplog.text
        assert fleet.slots() == {"m-alt-0": "ready", "m-alt-1": "ready"}
        assert [target.variant for target in fleet.routes.targets] == ["b", "b"]
        undone = await fleet.rollouts.undo("nick")
        assert (undone.new.source, undone.full) == ("fake/ok", True)
        rollout = await fleet.over()
        assert (rollout.phase, fleet.slots()) == ("completed", {"m-0": "ready", "m-1": "ready"})
        assert fleet.rollouts.models.changed_versions() == {}
        assert [record.new.source for record in fleet.rollouts.history("m")] == ["fake/new__ok", "fake/ok"]


async def test_a_fleet_file_that_says_something_new_wins_over_an_earlier_rollout(tmp_path: Path) -> None:
    path = fleet_file(tmp_path)
    async with swapping(path) as fleet:
        await fleet.start("fake/new", steps=(100.0,))
        await fleet.over()
    path.write_text(path.read_text().replace("fake/ok", "fake/newest"))
    async with swapping(path) as fleet:
        assert fleet.slots() == {"m-0": "ready"}
        assert fleet.rollouts.models.changed_versions() == {}


BAD = [
    ("crash", "failed", 1, "the standby didn't start: m-alt-0 exited with code 1: there is no such model"),
    ("wrong", "rolled_back", 4, "a golden prompt failed: m-alt-0.2 answered 'What is 2+2?' with 'Five.'"),
    ("moody", "rolled_back", 4, "answered the same prompt with"),
    ("nan", "rolled_back", 4, "numbers that aren't finite"),
    ("silent", "rolled_back", 4, "with nothing"),
    ("errs", "rolled_back", 4, "the canary errs"),
    ("slow", "rolled_back", 4, "first tokens are late"),
    ("weary-12", "rolled_back", 4, "the canary errs"),
    ("late-1__mortal-1", "rolled_back", 4, "the standby crashed: m-alt-0 exited with code 3"),
]


async def test_what_is_bad_goes_back_by_itself(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path, "golden: [{prompt: 'What is 2+2?', expect: '4'}]")) as fleet:
        pid = pid_of(fleet, "m-0")
        for behaviour, outcome, exit_code, reason in BAD:
            hold = 30.0 if "mortal" in behaviour else 0.0
            await fleet.start(f"fake/{behaviour}", hold=hold, steps=(10.0, 50.0, 100.0))
            rollout = await fleet.over()
            assert (rollout.phase, rollout.exit_code) == (outcome, exit_code), (behaviour, rollout.reason)
            assert reason in rollout.reason
            untouched(fleet, pid)
        assert len(fleet.rollouts.history("m")) == len(BAD)


async def test_users_of_a_canary_that_dies_are_served_by_the_old_version(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        pid = pid_of(fleet, "m-0")
        async with users(fleet.supervisor.url) as load:
            await fleet.start("fake/mortal-4", hold=60.0)
            rollout = await fleet.over()
            load.failures.clear()  # what the process itself had held
            served = sum(load.served.values())
            await fleet.until(lambda: sum(load.served.values()) > served + 20)
        assert load.failures == []
        assert (rollout.phase, "crashed" in rollout.reason) == ("rolled_back", True)
        untouched(fleet, pid)


async def until_judged(fleet: Swapping) -> Rollout:
    await fleet.until(lambda: fleet.rollouts.status("m").phase == "judging")
    await fleet.until(lambda: fleet.rollouts.status("m").verdicts)
    return fleet.rollouts.status("m")


@pytest.mark.parametrize("strategy", ["canary", "recreate"])
async def test_abort_goes_back_from_everywhere(tmp_path: Path, strategy: str) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        for phase in ("starting", "shifting", "judging"):
            options: dict[str, Any] = {"hold": 60.0, "strategy": strategy}
            await fleet.start("fake/late-1" if phase == "starting" else "fake/ok", **options)
            if phase == "shifting":
                await fleet.until_phase("warming", "proving", "proven", "shifting", "judging")
            else:
                await fleet.until_phase(phase)
            fleet.rollouts.command("m", e.Abort())
            rollout = await fleet.over()
            assert (rollout.phase, rollout.exit_code) == ("aborted", 4)
            assert fleet.slots() == {"m-0": "ready"}
            (target,) = fleet.routes.targets
            assert (target.slot, target.weight_bp, fleet.routes.hold) == ("m-0", 10_000, False)


async def test_a_paused_one_stays_until_it_is_resumed_and_promote_needs_no_verdict(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        await fleet.start("fake/ok", steps=(20.0, 60.0, 100.0), probes=False)
        await until_judged(fleet)
        fleet.rollouts.command("m", e.Pause())
        assert fleet.rollouts.command("m", e.Promote()).standby_bp == 6_000  # a person's word
        await fleet.until_phase("judging")
        await fleet.until(lambda: "60%" in fleet.rollouts.status("m").verdicts)
        await asyncio.sleep(0.5)
        paused = fleet.rollouts.status("m")
        assert (paused.phase, paused.step, paused.paused) == ("judging", 1, True)
        assert paused.verdicts["60%"].outcome == "hold"  # nobody has asked anything, and no probes
        fleet.rollouts.command("m", e.Resume())
        fleet.rollouts.command("m", e.Promote(full=True))
        assert (await fleet.over()).phase == "completed"
        with pytest.raises(SwapError, match=r"is over \(completed\); `undo` goes back"):
            fleet.rollouts.command("m", e.Pause())


async def test_recreate_makes_users_wait_and_loses_none(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        async with users(fleet.supervisor.url) as load:
            await fleet.until(lambda: sum(load.served.values()) > 30)
            await fleet.start("fake/late-1", strategy="recreate")
            rollout = await fleet.over()
            assert rollout.phase == "completed", rollout.reason
            served = sum(load.served.values())
            await fleet.until(lambda: sum(load.served.values()) > served + 20)
        assert load.failures == []
        assert load.longest > 0.9  # they waited for it
        assert {target.slot for target in fleet.routes.targets} == {"m-alt-0"}
        verdict = rollout.verdicts["100%"]
        assert (verdict.outcome, verdict.reference) == ("pass", "before the rollout")


async def test_recreate_starts_the_old_version_again_when_the_new_one_is_bad(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        async with users(fleet.supervisor.url) as load:
            for source in ("fake/crash", "fake/moody"):
                await fleet.start(source, strategy="recreate")
                rollout = await fleet.over()
                assert (rollout.phase, rollout.exit_code) == ("rolled_back", 4)
                assert fleet.slots() == {"m-0": "ready"}
            served = sum(load.served.values())
            await fleet.until(lambda: sum(load.served.values()) > served + 20)
        assert load.failures == []
        generations = {target.generation for target in fleet.routes.targets}
        assert generations == {3}  # no process has the name of one before it


async def stream(url: str, chunks: int, begun: asyncio.Event) -> list[str]:
    """The lines of a long answer of the fake model, one chunk each tenth of a second."""
    body = {"model": "m", "stream": True, "fake": {"chunks": chunks, "delay": 0.1}}
    lines = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    lines.append(line)
                    begun.set()
    return lines


async def test_a_long_stream_is_waited_for_up_to_the_drain_limit(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        begun = asyncio.Event()
        patient = asyncio.create_task(stream(fleet.supervisor.url, 60, begun))
        await begun.wait()
        await fleet.start("fake/ok", steps=(100.0,))
        rollout = await fleet.over()
        assert (rollout.phase, rollout.cut) == ("completed", 0)
        lines = await patient
        assert (len(lines), lines[-1]) == (61, "data: [DONE]")

        begun = asyncio.Event()
        endless = asyncio.create_task(stream(fleet.supervisor.url, 100_000, begun))
        await begun.wait()
        await fleet.start("fake/ok", steps=(100.0,), drain_limit=1.0)
        rollout = await fleet.over()
        assert (rollout.phase, rollout.cut) == ("completed", 1)
        lines = await endless
        assert "error" in json.loads(lines[-1].removeprefix("data: "))


def model_config(path: Path, layers: int, width: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
        "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    path.write_text(json.dumps(config))


async def test_two_that_do_not_fit_together_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model_config(tmp_path / "huge.json", 500, 16384)
    model_config(tmp_path / "small.json", 2, 256)
    async with swapping(fleet_file(tmp_path), make_ledger) as fleet:

        def asked(name: str) -> StartRequest:
            settings = {"device": "cpu", "max_num_seqs": 4}
            return StartRequest(source=f"random:{name}.json", set=settings, directory=str(tmp_path))

        plan = await fleet.rollouts.plan("m", asked("huge"))
        assert plan.exit_code == 5
        assert plan.changes == {"device": ("auto", "cpu"), "max_num_seqs": (None, 4)}
        with pytest.raises(SwapError, match=r"host: .*m-alt-0 take .* too much; .*`--strategy") as refused:
            await fleet.rollouts.start("m", asked("huge"))
        assert refused.value.exit_code == 5
        assert fleet.slots() == {"m-0": "ready"}
        alone = msgspec.structs.replace(asked("huge"), options=Options(strategy="recreate"))
        with pytest.raises(SwapError, match=r"host: .*m-alt-0 take .* too much") as refused:
            await fleet.rollouts.start("m", alone)  # it would not fit by itself either
        assert (refused.value.exit_code, "--strategy" in str(refused.value)) == (5, False)
        assert (await fleet.rollouts.plan("m", asked("small"))).exit_code == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (StartRequest(source=""), "--to: a source is needed"),
        (StartRequest(source="/none/model.gguf"), "--to: /none/model.gguf isn't there"),
        (
            StartRequest(source="fake/ok", set={"max_num_seq": 3}),
            "--set max_num_seq: unknown key; did you mean",
        ),
        (
            StartRequest(source="fake/ok", set={"max_num_seqs": "x"}),
            "--set max_num_seqs: must be a whole number",
        ),
        (StartRequest(source="fake/ok", options=Options(steps=(50, 20))), "steps must be ascending"),
        (
            StartRequest(source="fake/ok", set={"device": "cpu", "dtype": "float16"}),
            "dtype float16 needs a GPU",
        ),
    ],
)
def test_what_can_not_be_asked_for_is_said_in_the_words_of_the_fleet_file(
    tmp_path: Path, asked: StartRequest, message: str
) -> None:
    from gateway.fleet.driver.asked import new_version
    from gateway.fleet.versions import file_version

    (entry,) = load_fleet(fleet_file(tmp_path)).models
    with pytest.raises(SwapError) as refused:
        new_version(entry, file_version(entry), asked)
    assert message in str(refused.value)
    assert refused.value.exit_code == 2


def test_what_is_not_named_stays_as_it_is(tmp_path: Path) -> None:
    from gateway.fleet.driver.asked import new_version

    (entry,) = load_fleet(fleet_file(tmp_path)).models
    running = Version(source="fake/later", worker={"max_num_seqs": 8, "dtype": "float32"})
    options_alone = new_version(entry, running, StartRequest(set={"max_num_seqs": 4}))
    assert options_alone == Version(source="fake/later", worker={"max_num_seqs": 4, "dtype": "float32"})
    source_alone = new_version(entry, running, StartRequest(source="fake/ok"))
    assert source_alone == Version(source="fake/ok", worker=running.worker)


async def test_a_primary_that_dies_during_a_rollout_is_started_again(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        await fleet.start("fake/ok", hold=2.0)
        await fleet.until_phase("judging")
        psutil.Process(pid_of(fleet, "m-0")).kill()
        rollout = await fleet.over()
        assert rollout.phase == "completed"
        assert any("the primary crashed" in entry.what for entry in rollout.log)


async def test_a_model_that_is_down_can_be_swapped_for_one_that_works(tmp_path: Path) -> None:
    more = "  - {name: other, source: fake/ok}\n"
    path = fleet_file(tmp_path, more=more)
    async with swapping(path) as fleet:
        psutil.Process(pid_of(fleet, "m-0")).kill()
        await fleet.start("fake/ok", steps=(100.0,), probes=False)
        await fleet.until_phase("judging")
        fleet.rollouts.command("m", e.Promote(full=True))
        assert (await fleet.over()).phase == "completed"


def test_nothing_is_left_of_the_fleet(tmp_path: Path) -> None:
    """A stop in the middle of a rollout ends everything that it had started."""

    async def run() -> str:
        async with swapping(fleet_file(tmp_path)) as fleet:
            records = read_records(fleet.state.records)
            assert records is not None
            await fleet.start("fake/stuck", hold=60.0)
            await fleet.until_phase("judging")
            return records.instance

    assert marked(asyncio.run(run())) == []
