"""The command that writes nginx's configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.nginx import nginx as nginx_command
from gateway.fleet.state import Routes, RoutesFile, write_routes
from tests.gateway.nginx_fleet import fleet_file, targets


def run(*words: str) -> Any:
    return CliRunner().invoke(nginx_command, ["render", *words])


def test_the_file_is_written_as_a_whole(tmp_path: Path) -> None:
    fleet, out = str(fleet_file(tmp_path)), tmp_path / "pagefleet.conf"
    assert "would change" in run(fleet, "--out", str(out), "--dry-run").stdout
    assert not out.exists()
    assert "written" in run(fleet, "--out", str(out)).stdout
    assert "is as it should be" in run(fleet, "--out", str(out)).stdout
    assert run(fleet).stdout == out.read_text()
    assert json.loads(run(fleet, "--json").stdout)["config"] == out.read_text()
    assert not list(tmp_path.glob(".pagefleet*"))
    assert run(fleet, "--out", str(tmp_path / "none" / "x")).exit_code == 1


@pytest.mark.nginx
def test_what_nginx_refuses_is_not_written(tmp_path: Path) -> None:
    fleet, out = str(fleet_file(tmp_path)), tmp_path / "pagefleet.conf"
    assert run(fleet, "--test", "--out", str(out)).exit_code == 0
    before = out.read_text()
    refused = run(
        fleet, "--test", "--out", str(out), "--tls-cert", "/none", "--tls-key", "/none", "--listen", "8443"
    )
    assert refused.exit_code == 1
    assert "/none" in refused.stderr
    assert out.read_text() == before


@pytest.mark.nginx
def test_per_model_takes_the_routes_document(tmp_path: Path) -> None:
    fleet = str(fleet_file(tmp_path, "m", "n"))
    absent = run(fleet, "--per-model")
    assert absent.exit_code == 2
    assert "start the fleet first" in absent.stderr
    (tmp_path / "state").mkdir()
    documents = {"m": Routes(model="m", epoch=1, targets=targets(5_000, 5_000))}
    write_routes(tmp_path / "state" / "routes.json", RoutesFile(epoch=1, models=documents))
    for form in ("path", "port"):
        done = run(fleet, "--per-model", form, "--test", "--standalone")
        assert done.exit_code == 0, done.stderr
        assert done.stdout.count('server "unix:/run/s') == 2
    (tmp_path / "state" / "routes.json").write_text("{")
    assert run(fleet, "--per-model").exit_code == 2


def test_torch_and_jinja_are_not_loaded_at_start() -> None:
    import subprocess

    code = "import sys, gateway.cli.nginx; sys.exit('torch' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
