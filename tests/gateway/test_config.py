"""The fleet file: what is accepted, where it finds models, what the environment changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gateway.config import load_fleet
from tests.gateway.fleet_files import GOOD, problems, write

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).parents[2]


def test_defaults(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, GOOD))
    assert (fleet.gateway.host, fleet.gateway.port, fleet.gateway.processes) == ("127.0.0.1", 8000, 1)
    assert fleet.gateway.max_body == 64 * 1024**2
    timeouts = fleet.gateway.timeouts
    assert (timeouts.connect, timeouts.first_byte, timeouts.idle, timeouts.total) == (2, 120, 60, 900)
    assert fleet.models[0].replicas == 1
    assert fleet.models[0].source == "org/name"
    assert fleet.warnings() == []


@pytest.mark.parametrize("source", ["org/name@v1.0", "org/name@0123abcd/quant/m.gguf", "org/name/m.gguf"])
def test_models_of_the_hub(source: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"models: [{{name: a, source: {source}}}]\n")
    assert load_fleet(path).models[0].source == source


def test_the_file_of_the_design_parses(tmp_path: Path) -> None:
    """Every block of the documented file, less those that ask for what doesn't exist yet."""
    fleet = load_fleet(
        write(
            tmp_path,
            """
gateway:
  host: 127.0.0.1
  port: 8000
  processes: 1
  redis_url: null
  auth: {mode: none}
  limits: {default: {qps: 20, burst: 40, concurrency: 64}, on_redis_error: local}
  timeouts: {connect: 2s, first_byte: 120s, idle: 60s, total: 15m}
  max_body: 64MiB
  audit: {file: null, prompts: false}
supervisor: {backend: local, state_dir: ./.pagefleet}
defaults: {device: auto}
models:
  - name: qwen2-7b
    aliases: [qwen]
    source: Qwen/Qwen2.5-7B-Instruct
    replicas: 1
    limits: {qps: 10}
    golden: [{prompt: "What is 2+2?", expect: "4"}]
    judge: {min_requests: 50, max_error_rate: 0.01, max_ttft_ratio: 1.5, max_tpot_ratio: 1.3}
    worker: {gpus: [0], gpu_memory: 20GiB, max_model_len: 32768, max_num_seqs: 256}
""",
        )
    )
    assert fleet.models[0].worker.gpu_memory == 20 * 1024**3
    assert fleet.models[0].worker.gpus == (0,)
    assert fleet.models[0].limits is not None
    assert fleet.models[0].limits.qps == 10
    assert fleet.warnings() == []


def test_who_may_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path,
        "gateway: {auth: {trusted_proxies: [10.0.0.0/8, '::1', 'unix:'], forwarded_header: Forwarded}}\n"
        + GOOD,
    )
    fleet = load_fleet(path)
    assert fleet.gateway.auth.mode == "none"
    assert fleet.gateway.auth.trusted_proxies == ("10.0.0.0/8", "::1/128", "unix:")
    assert fleet.gateway.auth.forwarded_header == "forwarded"
    assert fleet.warnings() == []
    monkeypatch.setenv("PAGEFLEET_GATEWAY__AUTH__MODE", "keys")
    (warning,) = load_fleet(path).warnings()
    assert warning.startswith("gateway.auth.trusted_proxies has no effect")
    monkeypatch.setenv("PAGEFLEET_GATEWAY__AUTH__MODE", "none")
    monkeypatch.setenv("PAGEFLEET_GATEWAY__AUTH__TRUSTED_PROXIES", "[]")
    (warning,) = load_fleet(path).warnings()
    assert warning.startswith("gateway.auth.forwarded_header has no effect")


def test_model_options_win_over_defaults(tmp_path: Path) -> None:
    fleet = load_fleet(
        write(
            tmp_path,
            """
defaults: {device: cpu, max_num_seqs: 8}
models:
  - {name: a, source: o/n}
  - {name: b, source: o/n, worker: {max_num_seqs: 2}}
""",
        )
    )
    assert [(m.worker.device, m.worker.max_num_seqs) for m in fleet.models] == [("cpu", 8), ("cpu", 2)]


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    text = """
defaults: &d {device: cpu}
models:
  - {name: a, source: o/n, worker: {<<: *d, dtype: float32}}
"""
    assert load_fleet(write(tmp_path, text)).models[0].worker.device == "cpu"


def test_environment_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_GATEWAY__PORT", "9000")
    monkeypatch.setenv("PAGEFLEET_DEFAULTS__MAX_NUM_SEQS", "3")
    fleet = load_fleet(write(tmp_path, "gateway: {port: 8000, host: localhost}\n" + GOOD))
    assert (fleet.gateway.host, fleet.gateway.port) == ("localhost", 9000)
    assert fleet.models[0].worker.max_num_seqs == 3


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PAGEFLEET_GATEWAY_PORT", "1", "environment PAGEFLEET_GATEWAY_PORT: .*mean PAGEFLEET_GATEWAY__PORT"),
        ("PAGEFLEET_GATEWY_PORT", "1", "environment PAGEFLEET_GATEWY_PORT: .*mean PAGEFLEET_GATEWAY__PORT"),
        (
            "PAGEFLEET_SUPERVISOR_STATE_DIR",
            "x",
            "environment PAGEFLEET_SUPERVISOR_STATE_DIR: .*mean PAGEFLEET_SUPERVISOR__STATE_DIR",
        ),
        (
            "PAGEFLEET_GATEWAY_TIMEOUTS__IDLE",
            "1s",
            "environment PAGEFLEET_GATEWAY_TIMEOUTS__IDLE: .*mean PAGEFLEET_GATEWAY__TIMEOUTS__IDLE",
        ),
        ("PAGEFLEET_DEFAULTS_THREADS", "2", "environment .*mean PAGEFLEET_DEFAULTS__THREADS"),
        ("PAGEFLEET_MODEL", "[]", "environment .*mean PAGEFLEET_MODELS"),
        ("PAGEFLEET_ELSEWHERE__PORT", "1", "environment PAGEFLEET_ELSEWHERE__PORT: there is no such setting"),
        ("PAGEFLEET_GATEWAY__PORT", "70000", "environment PAGEFLEET_GATEWAY__PORT: gateway.port: .*65535"),
        ("PAGEFLEET_GATEWAY__PROT", "1", "environment PAGEFLEET_GATEWAY__PROT: .*did you mean 'port'"),
        ("PAGEFLEET_GATWAY__PORT", "1", "environment PAGEFLEET_GATWAY__PORT: there is no such setting"),
        ("PAGEFLEET_MODELS", "[", "environment: .*models"),
        (
            "PAGEFLEET_DEFAULTS__DEVICE",
            "tpu",
            "environment PAGEFLEET_DEFAULTS__DEVICE: defaults.device: .*tpu",
        ),
    ],
)
def test_bad_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    (problem,) = problems(write(tmp_path, GOOD))
    assert re.match(expected, problem)


@pytest.mark.parametrize(
    "variable",
    [
        *("PAGEFLEET_WORKER_MAX_NUM_SEQS=9", "PAGEFLEET_INSTANCE=abc/m-0.1", "PAGEFLEET_DEMO_MODEL=m.gguf"),
        *("PAGEFLEET_FORBID_SKIP=1", "PAGEFLEET_TEAM=search", "PAGEFLEET_GATEWAY_PORT=tcp://10.0.0.1:8000"),
        *("PAGEFLEET_GATEWAY_SERVICE_PORT=8000", "PAGEFLEET_GATEWAY_PORT_8000_TCP=tcp://10.0.0.1:8000"),
    ],
)
def test_variables_of_others_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    assert load_fleet(write(tmp_path, GOOD)).gateway.port == 8000


def test_the_state_directory_may_be_below_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fleet = load_fleet(write(tmp_path, "supervisor: {state_dir: ~/fleet}\n" + GOOD))
    assert fleet.supervisor.state_dir == tmp_path / "fleet"
    (problem,) = problems(write(tmp_path, "supervisor: {state_dir: ~nobody-here/x}\n" + GOOD))
    assert "supervisor.state_dir: ~nobody-here/x: Could not determine home directory" in problem


WRONG_SOURCES = {
    "empty": "holds no model",
    "gpt2": "a model of the hub is written org/name",
    "random:empty": "there is no config.json in the directory",
    "directory/no/m.gguf": "isn't there; looked in",
    "directory/m.gguf": "isn't there; looked in",
    "directory/m": "the hub's model of that name is directory/m@main",
    "o/m.gguf": "a file of the hub is written org/name/file.gguf",
    "./fra.gguf": "did you mean './far.gguf'?",
    "direktory/../fra.gguf": "isn't there",
    "./o/n/m.gguf": "isn't there; looked in",
    "random:o/n": "isn't there; looked in",
}


def test_relative_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file's directory, then from the working directory; always absolute afterwards."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "near.gguf").touch()
    (tmp_path / "far.gguf").touch()
    (tmp_path / "conf" / "c.json").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    path = tmp_path / "conf" / "fleet.yaml"
    sources = ["near.gguf", "far.gguf", "random:c.json", "directory", "random:directory", "o/n/deep/m.gguf"]
    path.write_text(json.dumps({"models": [{"name": f"m{i}", "source": s} for i, s in enumerate(sources)]}))
    found = [entry.source for entry in load_fleet(path).models]
    conf = str(tmp_path / "conf")
    assert found == [
        f"{conf}/near.gguf",
        f"{tmp_path}/far.gguf",
        f"random:{conf}/c.json",
        f"{tmp_path}/directory",
        f"random:{tmp_path}/directory",
        "o/n/deep/m.gguf",
    ]
    path.write_text(
        json.dumps({"models": [{"name": f"m{i}", "source": s} for i, s in enumerate(WRONG_SOURCES)]})
    )
    for problem, expected in zip(problems(path), WRONG_SOURCES.values(), strict=True):
        assert expected in problem


def test_unreadable_files(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == [": can't be read: No such file or directory"]
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"models: \xff\xfe")
    assert problems(path) == [": isn't UTF-8: byte 8 is invalid"]


def test_a_snapshot_loads_to_the_same_fleet(tmp_path: Path) -> None:
    """The supervisor hands the gateway its checked configuration as JSON."""
    fleet = load_fleet(write(tmp_path, "gateway: {max_body: 100MB}\n" + GOOD))
    snapshot = tmp_path / "fleet.json"
    snapshot.write_text(json.dumps(fleet.model_dump(), default=str))
    assert load_fleet(snapshot) == fleet


def test_a_gateway_starts_without_the_models_on_its_disk(tmp_path: Path) -> None:
    path = write(tmp_path, "models: [{name: a, source: /none/m.gguf}]\n")
    assert len(problems(path)) == 1
    assert load_fleet(path, check_sources=False).models[0].source == "/none/m.gguf"


@pytest.mark.parametrize("name", ["demo.yaml", "service.yaml", "three-models.yaml"])
def test_shipped_configurations(name: str, tmp_path: Path) -> None:
    """The demo's model may not have been fetched here; nothing else may be wrong."""
    text = (ROOT / "configs" / name).read_text()
    (tmp_path / "SmolLM2.gguf").touch()
    path = write(tmp_path, re.sub(r"\.\./models/SmolLM2\S*", "SmolLM2.gguf", text))
    fleet = load_fleet(path)
    assert fleet.gateway.port == 8000
    assert fleet.warnings() == []
