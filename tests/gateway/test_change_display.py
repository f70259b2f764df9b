"""What is told of a change of the fleet file that goes on, and of models that run something else than it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from click.testing import CliRunner
from rich.console import Console

from gateway.cli import main as pagefleet
from gateway.cli.change_display import News, summary
from gateway.cli.status import _page
from gateway.config import load_fleet
from gateway.fleet.admin import FleetStatus
from gateway.fleet.reconcile import Plan
from gateway.fleet.rollout import Version
from gateway.fleet.statedir import StateDir
from gateway.fleet.steps import Applying, Step
from gateway.fleet.versions import Running, Versions, file_version


def change(*steps: Step) -> Applying:
    return Applying(plan=Plan(fleet=(), models=()), steps=list(steps), started=1.0)


def test_each_step_is_said_when_it_gets_on() -> None:
    going = Step(name="a goes", state="running", detail="2 in flight")
    one, news = change(going, Step(name="b comes")), News()
    assert [line[9:] for line in news.lines(one)] == ["a goes: 2 in flight"]
    again = msgspec.json.decode(msgspec.json.encode(one), type=Applying)
    assert list(news.lines(again)) == []
    again.steps[0].state = "done"
    again.steps[1].state = "running"
    assert [line[9:] for line in news.lines(again)] == ["a goes: done: 2 in flight", "b comes"]


def test_status_shows_a_change_that_goes_on_and_for_a_while_what_failed() -> None:
    one = change(
        Step(name="a goes", state="done"), Step(name="b is swapped", state="running", detail="judging")
    )
    status = FleetStatus(
        supervisor=1,
        state_dir="/s",
        url="http://h",
        started=0.0,
        stopping=False,
        epoch=1,
        units=(),
        change=one,
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_page(status))
    assert "config apply: running, 1 of 2 steps" in shown.get()
    assert "  b is swapped: judging" in shown.get()
    one.state, one.ended, one.steps[1].state = "failed", time.time(), "failed"
    assert list(summary(one)) == ["config apply: failed, 2 of 2 steps", "  b is swapped: failed: judging"]
    one.ended = time.time() - 3600
    assert list(summary(one)) == []
    assert list(summary(None)) == []


def test_config_show_names_versions_that_differ_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"supervisor: {{state_dir: {tmp_path / 'state'}}}\n"
        "models: [{name: m, source: o/a, worker: {device: cpu}}, {name: other, source: o/a}]\n"
    )
    shown = CliRunner().invoke(pagefleet, ["config", "show", str(path)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    entry = load_fleet(path).models[0]
    new = Version(source="o/a", worker={"device": "cpu", "max_num_seqs": 8})
    running = Running(version=new, variant="b", rollout_id="r7", since=1.0, file=file_version(entry))
    state = StateDir(tmp_path / "state")
    state.make()
    Versions(state.versions).record({entry.name: running})
    shown = CliRunner().invoke(pagefleet, ["config", "show", str(path)])
    assert shown.stderr == "m: runs a (max_num_seqs=8) since rollout r7, not this\n"
    assert "source: o/a" in shown.stdout
