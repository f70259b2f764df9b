"""The routes file is what the supervisor says, whoever touches it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gateway.config import ModelEntry
from gateway.fleet.commands import Slot
from gateway.fleet.publisher import Publisher
from gateway.fleet.state import read_routes, write_routes
from gateway.fleet.unit import UnitStatus

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
