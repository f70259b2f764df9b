"""A gateway that serves takes over names, limits and time limits of its fleet file."""

from __future__ import annotations

from pathlib import Path

from gateway.board import CONFIG
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
