"""`pagefleet swap` as an operator uses it: what it says, and with which code it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from gateway.cli.swap_display import describe_version
from gateway.fleet.rollout import Version
from tests.conftest import ROOT
from tests.gateway.swapping import PATIENCE, Swapping, fleet_file, swapping

pytestmark = pytest.mark.timeout(240)

QUICK = ("--steps", "50%,100%", "--hold", "0s")


class Operator:
    """Somebody at a shell of the fleet's machine."""

    def __init__(self, fleet: Swapping) -> None:
        self._place = ["--state-dir", str(fleet.state.root)]

    async def swap(self, *arguments: str) -> Result:
        words = ["swap", *arguments, *self._place]
        return await asyncio.to_thread(CliRunner().invoke, pagefleet, words)

    async def json(self, *arguments: str) -> Any:
        return json.loads((await self.swap(*arguments, "--json")).stdout)


async def test_a_day_of_swaps(tmp_path: Path) -> None:
    async with swapping(fleet_file(tmp_path)) as fleet:
        operator = Operator(fleet)
        nothing = await operator.swap("status")
        assert (nothing.exit_code, "there was no rollout" in nothing.output) == (0, True)
        for command in ("status", "history"):  # questions, which have an answer
            nothing = await operator.swap(command, "m")
            assert (nothing.exit_code, "there was no rollout of" in nothing.output) == (0, True)
        assert (await operator.json("status", "m"), await operator.json("status")) == (None, [])
        for command in ("watch", "pause", "resume", "promote", "abort"):  # there is nothing to do it to
            nothing = await operator.swap(command, "nick")
            assert (nothing.exit_code, "there was no rollout of" in nothing.output) == (6, True), command
        nothing = await operator.swap("undo", "m")
        assert (nothing.exit_code, "there was no rollout of m;" in nothing.output) == (6, True)

        plan = await operator.swap("start", "nick", "--to", "fake/ok", "--set", "max-num-seqs=8", "--dry-run")
        assert (plan.exit_code, fleet.slots()) == (0, {"m-0": "ready"})
        assert "max_num_seqs: default → 8" in plan.output
        assert "steps: 5%, 25%, 100%, at least 2m0s on each" in plan.output

        done = await operator.swap("start", "m", "--to", "fake/ok", "--set", "max_num_seqs=8", *QUICK)
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert "m: starting: start: to fake/ok" in lines[0]
        assert "m: completed: the primary is gone" in lines[-1]
        assert fleet.rollouts.models.changed_versions()["m"].worker == {"max_num_seqs": 8}
        status = await asyncio.to_thread(
            CliRunner().invoke, pagefleet, ["status", "--state-dir", str(fleet.state.root)]
        )
        assert "m-alt-0" in status.output
        diff = await asyncio.to_thread(
            CliRunner().invoke, pagefleet, ["config", "diff", str(tmp_path / "fleet.yaml")]
        )
        assert (diff.exit_code, "nothing to change" in diff.stdout) == (0, True), diff.output
        assert "m: runs ok (max_num_seqs=8) since rollout" in diff.stderr

        bad = await operator.swap("start", "m", "--to", "fake/moody", *QUICK)
        assert (bad.exit_code, "rolled_back" in bad.stdout.splitlines()[-1]) == (4, True)

        begun = await operator.json("start", "m", "--to", "fake/ok", "--hold", "10m", "--detach")
        assert (begun["rollout"]["phase"], begun["exit_code"]) == ("starting", None)
        late = await operator.swap("watch", "m", "--timeout", "500ms")
        assert (late.exit_code, "still running" in late.stderr) == (3, True)
        assert (await operator.swap("start", "m", "--to", "fake/ok")).exit_code == 6
        await fleet.until_phase("judging")
        assert "judging, paused" in (await operator.swap("pause", "m")).output
        assert (await operator.json("status", "m"))["rollout"]["paused"] is True
        shown = await operator.swap("status", "m")
        assert "5% 25% 100%" in shown.output
        assert (await operator.swap("resume", "m")).exit_code == 0
        assert (await operator.swap("promote", "m")).exit_code == 0
        assert (await operator.swap("abort", "m")).exit_code == 0
        assert (await operator.swap("watch", "m")).exit_code == 4
        assert (await operator.swap("abort", "m")).exit_code == 6

        undone = await operator.swap("undo", "m")  # the first one: those since have changed nothing
        assert undone.exit_code == 0, undone.output
        assert (fleet.slots(), fleet.rollouts.models.changed_versions()) == ({"m-0": "ready"}, {})
        outcomes = [record["outcome"] for record in await operator.json("history", "m")]
        assert outcomes == ["completed", "rolled_back", "aborted", "completed"]
        assert "aborted by the operator" in (await operator.swap("history", "m")).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("start", "other", "--to", "fake/ok"), "the fleet has no model 'other'; it has m"),
        (("start", "m"), "what is to change? Give --to, --set, or both"),
        (("start", "m", "--to", "nowhere.gguf"), "nowhere.gguf isn't there; looked in"),
        (("start", "m", "--to", "fake/ok", "--set", "max_num_seqs"), "write it as OPTION=VALUE"),
        (
            ("start", "m", "--to", "fake/ok", "--set", "max_num_seqs=many"),
            "must be a whole number, not 'many'",
        ),
        (
            ("start", "m", "--to", "fake/ok", "--set", "dtypo=x"),
            "--set dtypo: unknown key; did you mean 'dtype'",
        ),
        (("start", "m", "--set", "rope_theta=.inf"), "--set rope_theta=.inf: a finite number is needed"),
        (("start", "m", "--set", "gpus=[0, -.inf]"), "a finite number is needed"),
        (("start", "m", "--set", "rope_theta=.nan"), "a finite number is needed"),
        (("start", "m", "--set", "rope_theta=1e999"), "--set rope_theta: must be a finite number"),
        (("start", "m", "--set", f"seed={2**64}"), "the number is too large"),
        (("start", "m", "--set", "seed=2026-01-02"), "no option takes a date; put text in quotes"),
        (("start", "m", "--set", "seed=2026-13-45"), "the value isn't YAML"),
        (("start", "m", "--set", f"seed={'[' * 5000}"), "the value isn't YAML"),
        (("start", "m", "--set", "gpus={1: 2}"), "keys must be text"),
        (("start", "m", "--set", "gpus=[zero]"), "must be a whole number, not 'zero'"),
        (("start", "m", "--set", "max_num_seqs=true"), "--set max_num_seqs: is no switch"),
        (("start", "m", "--set", "dtype=3"), "--set dtype: "),
        (("start", "m", "--set", "seed=1", "--set", "seed=2"), "--set seed is given twice"),
        (("start", "m", "--to", "fake/ok", "--hold", "9" * 400 + "d"), "hold must be a time from 0 s to 30d"),
        (("start", "m", "--to", "fake/ok", "--hold", "31d"), "hold must be a time from 0 s to 30d"),
        (("start", "m", "--to", "fake/ok", "--drain-limit", "31d"), "drain limit must be a time from 0 s"),
        (("start", "m", "--to", "fake/ok", "--hold", "\u0665s"), "is no duration"),
        (("start", "m", "--to", "fake/ok", "--steps", "nan,100%"), "is no list of percentages"),
        (("start", "m", "--to", "fake/ok", "--steps", "\u0665%,100%"), "is no list of percentages"),
        (("start", "m", "--to", "fake/ok", "--steps", "1_0%,1e2%"), "is no list of percentages"),
        (("start", "m", "--to", "fake/ok", "--steps", "5%,5%,100%"), "these are 5%,5%,100%"),
        (("start", "m", "--to", "fake/ok", "--steps", "100%,5%"), "steps must be ascending percentages"),
        (("start", "m", "--to", "fake/ok", "--steps", "few"), "is no list of percentages"),
        (("start", "m", "--to", "fake/ok", "--hold", "long"), "'long' is no duration"),
    ],
)
def test_what_can_not_be_asked_for_ends_with_code_2(
    fleet_of_one: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(pagefleet, ["swap", *arguments, "--state-dir", str(fleet_of_one)])
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({}, {}, "m.gguf"),
        ({"seed": 0}, {"block_size": 16}, "m.gguf"),  # defaults, whether they are written or not
        ({"max_num_seqs": 4}, {"enforce_eager": True}, "m.gguf (enforce_eager=true, max_num_seqs=default)"),
        ({}, {"an_option_of_another_release": 1}, "m.gguf"),
    ],
)
def test_versions_of_one_source_are_told_apart(old: dict[str, Any], new: dict[str, Any], words: str) -> None:
    running = Version(source="/srv/m.gguf", worker=old)
    assert describe_version(running) == "m.gguf"
    shown = describe_version(Version(source="/srv/m.gguf", worker=new), running)
    assert sorted(re.split(r"[ (),]+", shown)) == sorted(re.split(r"[ (),]+", words))


@pytest.fixture(scope="module")
def fleet_of_one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state directory of a fleet that runs in a process of its own."""
    folder = tmp_path_factory.mktemp("fleet")
    path = fleet_file(folder)
    argv = [sys.executable, "-m", "tests.gateway.swapping", "up", str(path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C stops it" in line:
            break
    yield folder / "state"
    process.terminate()
    process.communicate(timeout=PATIENCE)


COMMANDS = ("status", "watch", "pause", "resume", "promote", "abort", "undo", "history")


def test_no_fleet_is_said(tmp_path: Path) -> None:
    start = ["start", "m", "--set", "seed=1"]
    for words in (["status"], start, [*start, "--dry-run"], *([command, "m"] for command in COMMANDS)):
        result = CliRunner().invoke(pagefleet, ["swap", *words, "--state-dir", str(tmp_path)])
        assert (result.exit_code, "no fleet is up in" in result.stderr) == (1, True), words


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there_is_invalid_use(fleet_of_one: Path, command: str) -> None:
    result = CliRunner().invoke(pagefleet, ["swap", command, "other", "--state-dir", str(fleet_of_one)])
    assert (result.exit_code, "the fleet has no model 'other'; it has m" in result.stderr) == (2, True)


def test_ctrl_c_leaves_the_rollout_alone(fleet_of_one: Path) -> None:
    place = ["--state-dir", str(fleet_of_one)]
    words = ["start", "m", "--to", "fake/ok", "--hold", "10m", *place]
    argv = [sys.executable, "-m", "gateway.cli", "swap", *words]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "the rollout goes on" in errors) == (130, True)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            CliRunner().invoke(pagefleet, ["swap", "status", "m", "--json", *place]).stdout
        )
        return found

    assert status()["exit_code"] is None
    assert CliRunner().invoke(pagefleet, ["swap", "abort", "m", *place]).exit_code == 0
    deadline = time.monotonic() + PATIENCE
    while status()["exit_code"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert status()["exit_code"] == 4


def test_how_far_the_start_of_the_new_version_is(fleet_of_one: Path) -> None:
    place = ["--state-dir", str(fleet_of_one)]

    def said(*words: str) -> str:
        return CliRunner().invoke(pagefleet, [*words, *place]).stdout

    def starting() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(said("swap", "status", "m", "--json"))["starting"]
        return found

    assert "starting" in said("swap", "start", "m", "--to", "fake/late-3600", "--detach")
    deadline = time.monotonic() + PATIENCE
    while [unit["phase"] for unit in starting()] != ["weights"]:
        assert time.monotonic() < deadline, starting()
        time.sleep(0.1)
    (unit,) = starting()
    assert (unit["done"], unit["total"]) == (30, 100)
    slot = unit["slot"]
    assert re.search(rf"{slot} +starting +weights", said("swap", "status", "m"))
    assert f"m: starting: {slot}: weights 25%" in said("swap", "watch", "m", "--timeout", "100ms")
    watched = json.loads(said("swap", "watch", "m", "--timeout", "100ms", "--json").splitlines()[0])
    assert watched["starting"] == [unit]
    assert f"{slot}" in said("status")
    assert "weights 30%" in said("status")
    processes = json.loads(said("top", "--interval", "0.1", "--json"))["processes"]
    assert [(one["phase"], one["done"]) for one in processes if one["slot"] == slot] == [("weights", 30)]
    said("swap", "abort", "m")
    assert CliRunner().invoke(pagefleet, ["swap", "watch", "m", *place]).exit_code == 4
    assert starting() == []
