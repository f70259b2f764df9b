"""What people and files may put in a swap's way: names that look like paths and commands, files that can't be
read, another user, lines that a terminal would obey."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from gateway.fleet.logs import inert
from tests.faults.nursery import Fleet, Nursery

NOBODY = 65534


@pytest.fixture(scope="module")
def fleet(made: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Of the models m and n/history."""
    more = "  - {name: n/history, aliases: [n/pause], source: fake/ok, judge: {min_requests: 5}}\n"
    fleet = Fleet(made, tmp_path_factory.mktemp("fleet"), more=more)
    fleet.until(lambda: set(fleet.workers().values()) == {"ready"})
    yield fleet
    fleet.kill()


def swap(fleet: Fleet, *words: str) -> Result:
    return CliRunner().invoke(pagefleet, ["swap", *words, "--state-dir", str(fleet.state.root)])


NAMES = ("../stop", "..", ".", "m/../n", "m/./history", "m?dry_run=1", "m#x", "%2e%2e/stop", "ü\u202e")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_nowhere_else(fleet: Fleet, name: str) -> None:
    for words in (["start", name, "--set", "seed=1"], ["abort", name], ["status", name], ["history", name]):
        result = swap(fleet, *words)
        assert (result.exit_code, "the fleet has no model" in result.stderr) == (2, True), result.output
    status = fleet.status()
    assert status is not None
    assert (status.stopping, status.rollouts) == (False, ())


def test_a_models_name_may_end_as_a_command_does(fleet: Fleet) -> None:
    assert json.loads(swap(fleet, "status", "n/history", "--json").stdout) is None, "none yet"
    assert swap(fleet, "start", "n/pause", "--set", "seed=1", "--hold", "60s", "--detach").exit_code == 0
    fleet.until(lambda: fleet.rollout("n/history").phase == "judging")
    assert "judging, paused" in swap(fleet, "pause", "n/history").output
    assert swap(fleet, "abort", "n/pause").exit_code == 0
    assert fleet.over("n/history").phase == "aborted"
    assert len(fleet.swaps.history("n/history")) == 1
    assert fleet.swaps.history("m") == []


def test_a_question_with_a_time_that_is_none_is_answered_at_once(fleet: Fleet) -> None:
    complete(fleet)
    revision = fleet.rollout().revision
    transport = httpx.HTTPTransport(uds=str(fleet.state.admin_socket), verify=False)
    with httpx.Client(transport=transport, base_url="http://supervisor", timeout=60) as client:
        for wait in ("nan", "-inf", "-1e999", "0"):
            answer = client.get(f"/rollouts/m?revision={revision}&wait={wait}")
            assert (answer.status_code, answer.json()["exit_code"]) == (200, 0), wait
        assert client.get("/rollouts/m?revision=x").status_code == 422


def complete(fleet: Fleet) -> None:
    fleet.start(steps=(100.0,), hold=60.0, probes=False)
    fleet.until_phase("judging")
    fleet.swaps.command("m", "promote?full=1")
    assert fleet.over().phase == "completed"


def test_a_history_that_can_not_be_read_is_said(fleet: Fleet) -> None:
    path = fleet.state.rollouts / "m.history.jsonl"
    aside = path.with_suffix(".aside")
    path.rename(aside) if path.exists() else aside.touch()
    path.mkdir()
    try:
        result = swap(fleet, "history", "m")
        assert (result.exit_code, "m.history.jsonl: it is no file" in result.stderr) == (1, True), (
            result.output
        )
    finally:
        path.rmdir()
        aside.rename(path)
    assert swap(fleet, "history", "m").exit_code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_told_whose_fleet_it_is(fleet: Fleet) -> None:
    """And not that none is up, which he would start then."""
    for words in (["swap", "status"], ["status"]):
        place = ["--state-dir", str(fleet.state.root)]
        assert CliRunner().invoke(pagefleet, [*words, *place]).exit_code == 0  # all is loaded from here on
        said = as_nobody([*words, *place])
        assert re.search(r"^1 pagefleet: the fleet in .* is another user's.*\(sudo -u root\)$", said), said
    for command in ("logs m", "keys list", "limits get", "limits set model m --qps 1", "usage", "audit tail"):
        assert CliRunner().invoke(pagefleet, [*command.split(), "--help"]).exit_code == 0
        said = as_nobody([*command.split(), *place])
        assert re.search(r"^1 pagefleet: .*: Permission denied \(sudo -u root\)$", said), f"{command}: {said}"


def as_nobody(words: list[str]) -> str:
    """The exit code and the words of a command that another user gives."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(NOBODY)
        result = CliRunner().invoke(pagefleet, words)
        failure = "" if result.exception is None else repr(result.exception)
        os.write(writing, f"{result.exit_code} {result.output or failure}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said


def test_lines_of_processes_are_bounded_and_obeyed_by_no_terminal() -> None:
    assert inert("no such tensor: größe\t1") == "no such tensor: größe\t1"
    assert inert("\x1b]0;evil\x07\x9b31m\u202eabc\r") == "\\x1b]0;evil\\x07\\x9b31m\\u202eabc\\r"
    assert inert("x" * 10_000) == "x" * 400 + "…"
