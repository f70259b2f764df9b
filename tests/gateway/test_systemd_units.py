"""The unit files that `pagefleet systemd render` writes, as systemd itself reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gateway.cli.systemd import systemd as systemd_command
from gateway.config import ENV_PREFIX, FleetFile, load_fleet
from gateway.fleet import nginx
from gateway.fleet.errors import InvalidFleet
from gateway.fleet.ledger import Machine, make_ledger
from gateway.fleet.systemd import (
    MPS_UNIT,
    POLKIT_RULES,
    UNITS,
    SystemdInvalid,
    SystemdOptions,
    check_with_systemd,
    line,
    memory_limit,
    render,
    warnings,
    word,
)
from tests.conftest import ROOT

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SERVICES = [name for name in UNITS if name.endswith(".service")]


def fleet_file(folder: Path, **supervisor: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    worker = {"device": "cpu", "kv_cache_memory_bytes": "64MiB"}
    content = {
        "gateway": {"port": 8123, "audit": {"file": str(folder / "audit" / "requests.jsonl")}},
        "supervisor": {"backend": "systemd", "state_dir": str(folder / "state"), **supervisor},
        "models": [{"name": "m", "source": "random:config.json", "worker": worker}],
    }
    (folder / "audit").mkdir(exist_ok=True)
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def options_of(file: Path, **options: Any) -> SystemdOptions:
    return SystemdOptions(file, file.parent, **options)


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(systemd_command, ["render", *arguments])


def test_a_worker_is_bounded_as_the_fleet_file_says(tmp_path: Path) -> None:
    file = fleet_file(tmp_path, start_timeout="3m", stall_timeout="40s", drain_timeout="2m30s")
    fleet = load_fleet(file)
    ledger = make_ledger(fleet, Machine({}, 64 << 30))
    worker = settings(render(fleet, options_of(file), ledger)["pagefleet-worker@.service"])
    (estimate,) = [one.estimate for one in ledger.workers]
    assert estimate is not None
    assert worker["Type"] == ["notify"]
    assert worker["KillMode"] == ["mixed"]
    assert worker["TimeoutStartSec"] == ["180"]
    assert worker["TimeoutStopSec"] == ["170"]
    assert worker["Restart"] == ["no"]
    assert int(worker["MemoryMax"][0]) == memory_limit(ledger.workers[0])
    assert estimate.total < int(worker["MemoryMax"][0]) < 2 * estimate.total + (1 << 30)
    assert worker["ReadWritePaths"] == [str(tmp_path / "state"), str(tmp_path / "audit")]
    assert worker["User"] == ["pagefleet"]
    assert f"{tmp_path}/state/run %i" in worker["ExecStart"][0]


def test_a_worker_on_a_card_may_load_its_weights(tmp_path: Path) -> None:
    file = fleet_file(tmp_path)
    file.write_text(file.read_text().replace("device: cpu", "device: cuda"))
    (worker,) = make_ledger(load_fleet(file), Machine({0: 24 << 30}, 64 << 30)).workers
    limit = memory_limit(worker)
    assert worker.estimate is not None
    assert limit is not None
    assert limit > worker.estimate.weights + (4 << 30)


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables that units lack, of which a rendering warns."""
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("bare_environment")
def test_the_fleet_file_of_the_walk_through_is_one_for_systemd_and_nginx() -> None:
    file = ROOT / "configs" / "service.yaml"
    fleet = load_fleet(file, check_sources=False)
    options = SystemdOptions(file, ROOT, user_manager=True)
    assert set(render(fleet, options)) == set(UNITS)
    assert "server 127.0.0.1:8000 " in nginx.render(fleet, nginx.NginxOptions(standalone=True))
    assert [*fleet.warnings(), *warnings(fleet, options, None)] == []
    assert list(nginx.warnings(fleet, nginx.NginxOptions())) == []


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize(("user", "is_one"), [("root", True), ("nobody-by-this-name", False)])
def test_that_the_user_is_still_to_be_made_is_said(tmp_path: Path, user: str, is_one: bool) -> None:
    file = fleet_file(tmp_path)
    (tmp_path / "state").mkdir()
    said = list(warnings(load_fleet(file), options_of(file, user=user), None))
    assert [f"`useradd --system {user}`" in text and f"{tmp_path}/state" in text for text in said] == (
        [] if is_one else [True]
    )
    assert list(warnings(load_fleet(file), options_of(file, user=user, user_manager=True), None)) == []


@pytest.mark.usefixtures("bare_environment")
def test_that_a_directory_is_still_to_be_made_is_said(tmp_path: Path) -> None:
    """Without one of those that they may write to, systemd starts none of them."""
    file = fleet_file(tmp_path)
    (said,) = warnings(load_fleet(file), options_of(file, user="root"), None)
    assert f"`install -d -o root -m 700 {tmp_path}/state`" in said
    assert list(warnings(load_fleet(file), options_of(file, user_manager=True), None)) == []


@pytest.mark.systemd
@pytest.mark.parametrize("user_manager", [True, False])
def test_systemd_accepts_them(tmp_path: Path, user_manager: bool) -> None:
    folder = tmp_path / "1% $H"  # what a path may hold
    folder.mkdir()
    file = fleet_file(folder)
    units = render(load_fleet(file), options_of(file, user_manager=user_manager))
    check_with_systemd(units, user_manager)
    broken = {**units, "pagefleet-worker@.service": units["pagefleet-worker@.service"] + "KillMod=mixed\n"}
    with pytest.raises(SystemdInvalid, match="KillMod"):
        check_with_systemd(broken, user_manager)


@pytest.mark.systemd
@pytest.mark.parametrize(("user_manager", "most"), [(True, 6.4), (False, 2.0)])
def test_what_systemd_finds_exposed(tmp_path: Path, user_manager: bool, most: float) -> None:
    file = fleet_file(tmp_path)
    units = render(load_fleet(file), options_of(file, user_manager=user_manager))
    for name in SERVICES:
        (tmp_path / name).write_text(units[name])
        argv = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(tmp_path / name)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        level = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
        assert level, done.stderr
        assert float(level[1]) <= most, name


def test_paths_cannot_end_a_setting() -> None:
    assert word("/opt/a b") == '"/opt/a b"'
    assert word('/x"; $HOME %h \\') == '"/x\\"; $$HOME %%h \\\\"'
    assert line("/opt/a b%") == "/opt/a b%%"
    for value in ("/a\nExecStartPre=/bin/evil", "/a\0b", "/a\x85"):
        with pytest.raises(InvalidFleet, match="can't be in a unit"):
            word(value)


def test_what_units_cannot_do_is_said(tmp_path: Path) -> None:
    def refused(fleet: FleetFile, **options: Any) -> str:
        with pytest.raises(InvalidFleet) as caught:
            render(fleet, options_of(file, **options))
        return str(caught.value)

    file = fleet_file(tmp_path)
    fleet = load_fleet(file)
    gateway = fleet.gateway
    assert "backend is local" in refused(load_fleet(fleet_file(tmp_path, backend="local")))
    port = fleet.model_copy(update={"gateway": gateway.model_copy(update={"port": 0})})
    assert "gateway.port is 0" in refused(port)
    named = fleet.model_copy(update={"gateway": gateway.model_copy(update={"host": "llm.example"})})
    assert "needs an address, not a name" in refused(named)
    assert "no name of a user" in refused(fleet, user='x"; evil')
    assert "no such user" in refused(fleet, user="nobody-by-this-name")
    deep = load_fleet(fleet_file(tmp_path, state_dir=str(tmp_path / ("deep" * 25))))
    assert "bytes too long" in refused(deep)


def test_written_as_a_whole_and_only_what_differs(tmp_path: Path) -> None:
    file, out = str(fleet_file(tmp_path)), tmp_path / "units"
    dry = run(file, "--out", str(out), "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "would change" in dry.output
    assert "systemctl daemon-reload" in dry.stderr
    assert not out.exists()
    first = json.loads(run(file, "--out", str(out), "--json").stdout)
    assert sorted(first["changed"]) == sorted([*UNITS, POLKIT_RULES])
    assert {path.name: path.read_text() for path in out.iterdir()} == first["units"]
    (out / "pagefleet.target").write_text("# by hand\n")
    assert json.loads(run(file, "--out", str(out), "--json").stdout)["changed"] == ["pagefleet.target"]
    user = json.loads(run(file, "--user", "--mps", "--json").stdout)["units"]
    assert sorted(user) == sorted([*UNITS, MPS_UNIT])
    assert "User=" not in "".join(user.values())
    assert "CUDA_MPS_PIPE_DIRECTORY" in user["pagefleet-worker@.service"]
    bad = run(file, "--user-name", "nobody-by-this-name")
    assert (bad.exit_code, bad.stdout) == (2, "")


def test_the_environment_here_is_not_that_of_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_GATEWAY__PORT", "8200")
    done = run(str(fleet_file(tmp_path)))
    assert "PAGEFLEET_GATEWAY__PORT: in this environment, and not in the units'" in done.stderr
    assert "ListenStream=127.0.0.1:8200" in done.stdout
