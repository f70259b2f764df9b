"""The fleet file: what is accepted, and that everything wrong is said at once with its place."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gateway.config import ConfigError, load_fleet

GOOD = "models: [{name: a, source: org/name}]\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("PAGEFLEET_") and "__" in name:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_fleet(path)
    return [str(problem).removeprefix(str(path)) for problem in caught.value.problems]


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


A = "models:\n  - name: a\n    source: o/n\n"
CASES = {
    "half precision on a CPU": (
        A + "    worker: {device: cpu, dtype: float16}\n",
        ":4: models[0].worker: dtype float16 needs a GPU; on a CPU only float32",
    ),
    "half precision on a CPU as default": (
        "defaults: {device: cpu, dtype: float16}\n" + A + "  - {name: b, source: o/n}\n",
        ":1: defaults: dtype float16 needs a GPU; on a CPU only float32",
    ),
    "a step smaller than its sequences": (
        A + "    worker: {max_num_seqs: 8, max_num_batched_tokens: 4}\n",
        ":4: models[0].worker: max_num_batched_tokens (4) must be at least max_num_seqs (8): a step",
    ),
    "words for a whole number": (
        A + "    worker: {max_num_seqs: many}\n",
        ":4: models[0].worker.max_num_seqs: must be a whole number, not 'many'",
    ),
    "unknown key": (A + "    replica: 2\n", ":4: models[0].replica: unknown key; did you mean 'replicas'?"),
    "unknown top-level key": ("model: []\n" + GOOD, ":1: model: unknown key; did you mean 'models'?"),
    "unknown key without likeness": (
        "supervisor: {zzz: 1}\n" + GOOD,
        ":1: supervisor.zzz: unknown key; known here: backend, drain_timeout, stall_timeout, "
        "start_timeout, state_dir",
    ),
    "unknown worker option": (
        A + "    worker:\n      gpu_memroy: 1GiB\n",
        ":5: models[0].worker.gpu_memroy: unknown key; did you mean 'gpu_memory'?",
    ),
    "no models": ("gateway: {}\n", ":1: models: this key is needed"),
    "empty list of models": ("gateway: {}\nmodels: []\n", ":2: models: at least one model is needed"),
    "missing source": ("models:\n  - name: a\n", ":2: models[0].source: this key is needed"),
    "bad size": (
        A + "    worker: {gpu_memory: 20Gib/s}\n",
        ":4: models[0].worker.gpu_memory: '20Gib/s' is no size; write a number with",
    ),
    "bad duration": (
        "gateway:\n  timeouts:\n    connect: 2 parsecs\n" + GOOD,
        ":3: gateway.timeouts.connect: '2 parsecs' is no duration; write a number with us, ms, s, m, h or d",
    ),
    "zero timeout": (
        "gateway: {timeouts: {idle: 0s}}\n" + GOOD,
        ":1: gateway.timeouts.idle: a duration must be more than 0 and at most 7d",
    ),
    "port out of range": (
        "gateway:\n  port: 99999\n" + GOOD,
        ":2: gateway.port: must be at most 65535, not 99999",
    ),
    "port that is a truth value": (
        "gateway: {port: yes}\n" + GOOD,
        ":1: gateway.port: a number is needed, not true or false",
    ),
    "duplicate name": (
        "models:\n  - {name: a, source: o/n}\n  - {name: a, source: o/n}\n",
        ":3: models[1].name: 'a' is already the name of models[0]",
    ),
    "alias is another's name": (
        "models:\n  - {name: a, source: o/n, aliases: [b]}\n  - {name: b, source: o/n}\n",
        ":2: models[0].aliases[0]: 'b' is already the name of models[1]",
    ),
    "alias twice": (
        "models:\n  - {name: a, source: o/n, aliases: [c]}\n  - {name: b, source: o/n, aliases: [c]}\n",
        ":3: models[1].aliases[0]: 'c' is already the alias of models[0]",
    ),
    "name that reads as a question about another": (
        "models:\n  - {name: a, source: o/n}\n  - {name: a/history, source: o/n}\n",
        ":3: models[1].name: 'a/history' can't be told from a question about 'a'; name it otherwise",
    ),
    "alias that reads as a command to another": (
        "models:\n  - {name: a/b, source: o/n}\n  - {name: c, source: o/n, aliases: [x/undo, a/b/abort]}\n",
        ":3: models[1].aliases[1]: 'a/b/abort' can't be told from a question about 'a/b'; name it otherwise",
    ),
    "name with a space": (
        "models: [{name: a b, source: o/n}]\n",
        ":1: models[0].name: letters, digits and . _ : / @ + - are allowed, starting with a letter or digit, "
        "not 'a b'",
    ),
    "file that isn't there": (
        "models:\n  - name: a\n    source: /none/m.gguf\n",
        ":3: models[0].source: /none/m.gguf isn't there",
    ),
    "random without its file": (
        "models: [{name: a, source: 'random:/none/c.json'}]\n",
        ":1: models[0].source: /none/c.json isn't there",
    ),
    "duplicate key": (
        "gateway:\n  port: 1\n  port: 2\n" + GOOD,
        ":3: gateway.port: this key is already in line 2; keep one of them",
    ),
    "key that isn't text": (
        "gateway: {on: 1}\n" + GOOD,
        ":1: gateway.on: a key must be text; put it in quotes",
    ),
    "redis": (
        "gateway:\n  redis_url: http://:secret@h/0\n" + GOOD,
        ":2: gateway.redis_url: the Redis URL can't be used; it must look like redis://HOST:PORT/DB, "
        "rediss://… (TLS), unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB or "
        "redis+cluster://HOST:PORT,HOST:PORT",
    ),
    "a burst without a rate": (
        "gateway:\n  limits:\n    default: {burst: 5}\n" + GOOD,
        ":3: gateway.limits.default: burst has a meaning only beside qps; set qps too or leave burst out",
    ),
    "a burst that never comes back": (
        "models: [{name: a, source: org/name, limits: {qps: 0.001, burst: 100000}}]\n",
        ":1: models[0].limits: burst 100000 at qps 0.001 takes over 31 days to come back; raise qps or lower "
        "burst",
    ),
    "tokens": (
        "gateway:\n  limits: {default: {tokens_per_minute: 1e12}}\n" + GOOD,
        ":2: gateway.limits.default.tokens_per_minute: must be a whole number, not '1e12'",
    ),
    "processes that can't count together": (
        "gateway:\n  processes: 3\n  limits: {default: {qps: 5}}\n" + GOOD,
        ":2: gateway.processes: 3 processes can't count limits together without Redis; set "
        "gateway.redis_url or processes: 1, or take the limits out",
    ),
    "auth": (
        "gateway: {auth: {mode: oidc}}\n" + GOOD,
        ":1: gateway.auth: mode oidc needs issuer and audience",
    ),
    "auth that nobody knows": (
        "gateway: {auth: {mode: key}}\n" + GOOD,
        ":1: gateway.auth.mode: must be 'none', 'keys' or 'oidc', not 'key'",
    ),
    "trusted proxy": (
        "gateway:\n  auth:\n    trusted_proxies:\n      - 10.0.0.0/8\n      - 10.0.0.1/8\n" + GOOD,
        ":5: gateway.auth.trusted_proxies[1]: '10.0.0.1/8' is no trusted proxy: 10.0.0.1/8 has host bits "
        "set; write an address, a network such as 10.0.0.0/8, or unix: for peers on a Unix socket",
    ),
    "trusted proxy by name": (
        "gateway: {auth: {trusted_proxies: [nginx]}}\n" + GOOD,
        ":1: gateway.auth.trusted_proxies[0]: 'nginx' is no trusted proxy: 'nginx' does not appear to be an "
        "IPv4 or IPv6 network; write an address, a network such as 10.0.0.0/8, or unix: for peers on a Unix "
        "socket",
    ),
    "trusted proxies that are no list": (
        "gateway: {auth: {trusted_proxies: 10.0.0.1}}\n" + GOOD,
        ":1: gateway.auth.trusted_proxies: must be a list, not '10.0.0.1'",
    ),
    "unix: without quotes": (
        "gateway: {auth: {trusted_proxies: [unix:]}}\n" + GOOD,
        ":1: gateway.auth.trusted_proxies[0]: must be text; put it in quotes",
    ),
    "forwarded header": (
        "gateway: {auth: {forwarded_header: x-real-ip}}\n" + GOOD,
        ":1: gateway.auth.forwarded_header: must be 'x-forwarded-for' or 'forwarded', not 'x-real-ip'",
    ),
    "processes": (
        "gateway: {processes: 65}\n" + GOOD,
        ":1: gateway.processes: must be at most 64, not 65",
    ),
    "audit": (
        "gateway: {audit: {file: /}}\n" + GOOD,
        ":1: gateway.audit.file: / is a directory; name a file in it",
    ),
    "audit in no directory": (
        "gateway: {audit: {file: /dev/null/audit.jsonl}}\n" + GOOD,
        ":1: gateway.audit.file: /dev/null is no directory",
    ),
    "audit of a tiny size": (
        "gateway: {audit: {file: a.jsonl, max_size: 1KiB}}\n" + GOOD,
        ":1: gateway.audit.max_size: must be at least 65536",
    ),
    "audit that keeps nothing": (
        "gateway: {audit: {file: a.jsonl, keep: 0}}\n" + GOOD,
        ":1: gateway.audit.keep: must be at least 1",
    ),
    "backend": (
        "supervisor: {backend: ray}\n" + GOOD,
        ":1: supervisor.backend: 'ray' is not supported yet; use local or systemd",
    ),
    "bad regular expression": (
        A + "    golden: [{prompt: x, expect: '/(/'}]\n",
        ":4: models[0].golden[0].expect: this is no regular expression: missing ), unterminated subpattern "
        "at position 0",
    ),
    "empty file": ("", ":1: the file is empty"),
    "not a mapping": ("- a\n", ":1: the top level must be a mapping with the key 'models'"),
    "not YAML": (
        "gateway: {port: 1\nmodels: [\n",
        ":2: this isn't YAML: expected ',' or '}', but got ':'",
    ),
    "a tag that runs code": (
        "models: !!python/object/apply:os.system ['true']\n",
        ":1: this isn't YAML: could not determine a constructor for the tag",
    ),
    "a document within itself": ("models: &x [*x]\n", "an anchor in line 1 contains itself"),
    "a mapping in place of a list": ("models: {name: a}\n", ":1: models: must be a list"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_problem(case: str, tmp_path: Path) -> None:
    text, expected = CASES[case]
    (problem,) = problems(write(tmp_path, text))
    assert expected in problem
    assert "secret" not in problem


def test_an_expanding_document_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (problem,) = problems(write(tmp_path, "\n".join(lines)))
    assert "expands to more than" in problem


def test_everything_at_once_in_order_of_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
gateway:
  prot: 8
  port: 0x1FFFF
  timeouts: {connect: soon}
defaults: {device: tpu}
models:
  - {name: a, source: none.gguf, aliases: [b]}
  - {name: b, source: o/n}
  - {name: b, source: o/n}
""",
    )
    found = problems(path)
    assert [int(line.split(":")[1]) for line in found] == [3, 4, 5, 6, 8, 8, 10]
    assert len([line for line in found if "defaults.device" in line]) == 1


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
