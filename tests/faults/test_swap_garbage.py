"""Files of the state directory that a crash, a disk or somebody has spoilt: a fleet comes up, and swaps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from tests.faults.nursery import Fleet, Nursery

KINDS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "no text": lambda _: b'{"\xff\xfe": "\xff"}',
    "null": lambda _: b"null",
    "another thing": lambda _: b'{"version": "9", "models": 7, "m": []}',
    "nested": lambda _: b"[" * 200_000,
    "nested in a field": lambda data: data.replace(b'"worker":{', b'"worker":{"x":' + b"[" * 200_000, 1),
    "no such step": lambda data: re.sub(rb'"step":[-0-9]+', b'"step":7', data),
    "no such share": lambda data: data.replace(b'"standby_bp":10000', b'"standby_bp":-3'),
    "newer": lambda data: data.replace(b'"version":1,', b'"version":2,"added":[1],'),
}


@pytest.fixture(scope="module")
def fleet(made: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """With a rollout that is over, and one in the middle; it is down."""
    fleet = Fleet(made, tmp_path_factory.mktemp("fleet"))
    fleet.start()
    assert fleet.over().phase == "completed"
    fleet.start(hold=60.0)
    fleet.until_phase("judging")
    fleet.kill()
    return fleet


@pytest.fixture(scope="module")
def whole(fleet: Fleet) -> dict[Path, bytes]:
    """All files of the state directory but logs, as they were."""
    paths = [path for path in fleet.state.root.rglob("*") if path.is_file() and path.parent.name != "logs"]
    return {path: path.read_bytes() for path in paths if path.suffix in (".json", ".jsonl")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fleet_comes_up_and_swaps(fleet: Fleet, whole: dict[Path, bytes], kind: str) -> None:
    assert {"versions.json", "routes.json", "m.json", "m.history.jsonl", "fleet.json", "processes.json"} <= {
        path.name for path in whole
    }
    for path, data in whole.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(KINDS[kind](data))
    for command in ("status", "swap status", "swap history m", "logs m", "keys list", "limits get"):
        done = CliRunner().invoke(pagefleet, [*command.split(), "--state-dir", str(fleet.state.root)])
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
    fleet.up()
    try:
        fleet.until(lambda: fleet.swaps.latest("m") is None or fleet.rollout().terminal or kind == "newer")
        fleet.until(lambda: "ready" in fleet.workers().values())
        if fleet.swaps.latest("m") is None or fleet.rollout().terminal:
            fleet.start()
        assert fleet.over().phase in ("completed", "rolled_back")
        assert fleet.swaps.history("m")
    finally:
        fleet.kill()
