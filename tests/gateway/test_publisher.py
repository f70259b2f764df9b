"""The routes file is what the supervisor says, whoever touches it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gateway.fleet.commands import Slot
from gateway.fleet.errors import InvalidFleet
from gateway.fleet.publisher import Publisher, Split
from gateway.fleet.state import Routes, read_routes, write_routes
from gateway.fleet.unit import UnitState, UnitStatus
from gateway.settings import ModelEntry

ENTRY = ModelEntry(name="m", source="org/name")


def publisher(path: Path) -> Publisher:
    made = Publisher(path, [Slot("m-0", ENTRY, 0)])
    made.update(UnitStatus(slot="m-0", role="worker", state="ready", generation=1), "unix:/tmp/m.sock")
    return made


def test_a_routes_file_that_vanishes_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = publisher(path)
    before = read_routes(path)
    path.unlink()
    made.flush()
    assert read_routes(path) == before
    assert before.models["m"].targets[0].state == "ready"


def test_a_routes_file_that_somebody_changes_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = publisher(path)
    before = read_routes(path)
    path.write_text("{}")
    made.flush()
    assert read_routes(path) == before


def test_a_routes_file_that_is_as_it_was_left_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = publisher(path)
    before = path.stat()
    made.flush()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_directory_that_is_gone_is_reported_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    made = publisher(folder / "routes.json")
    (folder / "routes.json").unlink()
    folder.rmdir()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            made.flush()
    assert len(caplog.records) == 1
    folder.mkdir()
    made.flush()
    assert read_routes(folder / "routes.json").models["m"].targets


def test_epochs_grow_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    first = publisher(path)
    write_routes(path, read_routes(path))
    second = publisher(path)
    assert second.epoch > first.epoch
    path.write_text("{")
    third = Publisher(path, least=second.epoch)
    assert third.epoch == second.epoch, "what gateways have is no older than that"


def test_routes_that_can_not_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "routes.json").mkdir()
    with pytest.raises(InvalidFleet, match=r"routes\.json can't be read \(Is a directory\)"):
        Publisher(tmp_path / "routes.json")


# --- how users are split


def ready(slot: str, generation: int = 1, state: UnitState = "ready") -> UnitStatus:
    return UnitStatus(slot=slot, role="worker", state=state, generation=generation)


def weights(routes: Routes) -> list[tuple[str, int]]:
    return [(target.slot, target.weight_bp) for target in routes.targets]


def replicas(path: Path) -> Publisher:
    """Two replicas of the old version and two of the new one."""
    names = ("m-alt-0", "m-alt-1", "m-0", "m-1")
    made = Publisher(path, [Slot(name, ENTRY, 0, "b" if "-alt-" in name else "") for name in names])
    for name in names:
        made.update(ready(name), f"unix:/tmp/{name}.sock")
    return made


def test_a_version_without_a_share_gets_nothing(tmp_path: Path) -> None:
    made = replicas(tmp_path / "routes.json")
    assert weights(made.routes("m")) == [("m-0", 10_000), ("m-1", 10_000), ("m-alt-0", 0), ("m-alt-1", 0)]


def test_a_share_is_divided_among_the_replicas_that_are_ready(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = replicas(path)
    split = Split(weights={"": 9_475, "b": 525}, rollout_id="r", salt="s")
    epoch = made.split("m", split)
    routes = read_routes(path).models["m"]
    assert weights(routes) == [("m-0", 4_737), ("m-1", 4_738), ("m-alt-0", 262), ("m-alt-1", 263)]
    assert (routes.rollout_id, routes.salt, read_routes(path).epoch) == ("r", "s", epoch)
    made.update(ready("m-1", state="backoff"), "unix:/tmp/m-1.sock")
    assert weights(made.routes("m")) == [("m-0", 9_475), ("m-1", 0), ("m-alt-0", 262), ("m-alt-1", 263)]
    assert made.split("m", split) == made.epoch


def test_the_primary_comes_first_and_the_standby_last(tmp_path: Path) -> None:
    made = replicas(tmp_path / "routes.json")
    made.split("m", Split(weights={"b": 10_000, "": 0}))
    assert weights(made.routes("m")) == [("m-alt-0", 10_000), ("m-alt-1", 10_000), ("m-0", 0), ("m-1", 0)]


def test_a_slot_that_is_dropped_leaves_the_document_and_its_model_stays(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = publisher(path)
    made.drop("m-0")
    assert read_routes(path).models["m"].targets == ()
    made.forget("m")
    assert read_routes(path).models == {}


def test_requests_may_be_held(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    publisher(path).split("m", Split(weights={"": 0}, hold=True))
    routes = read_routes(path).models["m"]
    assert (routes.hold, weights(routes)) == (True, [("m-0", 0)])


def test_withheld_workers_get_nothing_until_they_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = replicas(path)
    made.split("m", Split(weights={"": 10_000}))
    epoch = made.withhold(["m-1", "not-there"])
    found = read_routes(path)
    assert found.epoch == epoch
    assert dict(weights(found.models["m"]))["m-0"] == 10_000
    assert dict(weights(found.models["m"]))["m-1"] == 0
    made.drop("m-1")
    assert "m-1" not in dict(weights(read_routes(path).models["m"]))


def test_a_retired_model_is_still_routed(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    made = publisher(path)
    epoch = made.retire("m")
    found = read_routes(path)
    assert (found.epoch, found.models["m"].retired) == (epoch, True)
    assert found.models["m"].targets[0].weight_bp == 10_000
    made.forget("m")
    assert read_routes(path).models == {}
