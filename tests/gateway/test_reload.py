"""A gateway that serves takes over names, limits and time limits of its fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway import reload
from gateway.board import CONFIG
from gateway.config import FleetFile, load_fleet
from gateway.reload import digest
from tests.gateway.rig import Rig, error_of, target, until

ONE = "models: [{name: m, source: o/n, aliases: [nick]}]\n"
OTHER = """
gateway: {timeouts: {total: 7s}}
models:
  - {name: m, source: o/n, aliases: [nick, new], limits: {qps: 0.001, burst: 3}}
  - {name: later, source: o/n}
"""


def replace(path: Path, text: str) -> int:
    """As the supervisor does: the whole file at once."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
    return digest(text.encode())


def test_the_digest_is_that_of_what_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the file is replaced while it is read."""
    path = tmp_path / "fleet.yaml"
    first = replace(path, ONE)

    def late(path: Path, **options: Any) -> FleetFile:
        replace(path, OTHER)
        return load_fleet(path, **options)

    monkeypatch.setattr(reload, "load_fleet", late)
    fleet, number = reload._load(path)
    assert (number, [entry.name for entry in fleet.models]) == (first, ["m"])


async def test_it_follows_its_file(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.fleet_file = tmp_path / "fleet.yaml"
    first = replace(rig.fleet_file, ONE)
    rig.route(target(await rig.worker()))
    async with rig.running():
        shown = rig.app.metrics.board.numbers((CONFIG,))
        await until(lambda: shown[0] == first)
        assert (await rig.post()).status_code == 200
        assert error_of(await rig.post({"model": "new"}))["code"] == "model_not_found"
        assert error_of(await rig.post({"model": "later"}))["code"] == "model_not_found"

        second = replace(rig.fleet_file, OTHER)
        await until(lambda: shown[0] == second)
        assert [(await rig.post({"model": "new"})).status_code for _ in range(4)] == [200, 200, 200, 429]
        starting = await rig.post({"model": "later"})  # known, and no worker has come up yet
        assert (starting.status_code, error_of(starting)["code"]) == (503, "model_starting")
        assert rig.app.means.settings.timeouts.total == 7

        replace(rig.fleet_file, "models: [{name: m, source")  # half of a file
        assert (await rig.post({"model": "nick"})).status_code == 429
        third = replace(rig.fleet_file, ONE)
        await until(lambda: shown[0] == third)
        assert [(await rig.post()).status_code for _ in range(5)] == [200] * 5
        assert error_of(await rig.post({"model": "later"}))["code"] == "model_not_found"
