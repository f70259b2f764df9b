"""`pagefleet plan`: sums per card, what fits beside, and what doesn't fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gateway.cli.plan import plan
from gateway.config import load_fleet
from gateway.fleet.ledger import HOST, Machine, make_ledger

GIB = 1 << 30
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip


def fleet_file(folder: Path, *workers: dict[str, Any], **model: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    models = [
        {"name": f"m{i}", "source": "random:./config.json", "worker": worker, **model}
        for i, worker in enumerate(workers)
    ]
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    return path


def ledger_of(folder: Path, machine: Machine, *workers: dict[str, Any], **model: Any) -> Any:
    return make_ledger(load_fleet(fleet_file(folder, *workers, **model)), machine)


def test_sums_and_what_fits_beside(tmp_path: Path) -> None:
    machine = Machine({0: 24 * GIB, 1: 80 * GIB}, 64 * GIB)
    ledger = ledger_of(
        tmp_path, machine,
        {"gpu_memory": "10GiB"}, {"gpu_memory": "8GiB"}, {"gpus": [1], "gpu_memory": "20GiB"},
        {"device": "cpu"},
    )  # fmt: skip
    assert ledger.problems == ()
    assert [worker.place for worker in ledger.workers] == ["gpu0", "gpu0", "gpu1", HOST]
    assert [worker.swap for worker in ledger.workers] == ["recreate", "recreate", "canary", "canary"]
    for place in ledger.places:
        mine = [worker.total for worker in ledger.workers if worker.place == place.name]
        assert place.taken - sum(mine) == (2 * (128 << 20) if place.name == HOST else 0)
        assert place.left == place.total - place.taken
    for worker in ledger.workers[:3]:
        parts = worker.estimate
        assert parts.weights == 2 * 1_235_814_400  # Llama-3.2-1B's parameters, in bfloat16
        assert 0.95 * parts.budget < parts.weights + parts.activations + parts.kv_cache <= parts.budget


def test_an_fp8_cache_holds_twice_as_much(tmp_path: Path) -> None:
    machine = Machine({0: 80 * GIB}, 64 * GIB)
    plain, fp8 = ledger_of(
        tmp_path, machine, {"gpu_memory": "8GiB"}, {"gpu_memory": "8GiB", "kv_cache_dtype": "fp8"}
    ).workers
    assert fp8.estimate.num_pages - 2 * plain.estimate.num_pages in (0, 1)
    assert fp8.total <= plain.total


def test_every_replica_counts(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, Machine({0: 24 * GIB}, 64 * GIB), {"gpu_memory": "9GiB"}, replicas=3)
    (problem,) = ledger.problems
    assert problem.startswith("gpu0: m0-0, m0-1, m0-2 take ")
    assert "gpu_memory" in problem


def test_two_that_take_most_of_one_card_do_not_fit(tmp_path: Path) -> None:
    """The default is 0.9 of the card for each."""
    assert ledger_of(tmp_path, Machine({0: 24 * GIB}, 64 * GIB), {}).problems == ()
    assert ledger_of(tmp_path, Machine({0: 24 * GIB}, 64 * GIB), {}, {}).problems


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, Machine({0: 24 * GIB}, 64 * GIB), {"gpus": [3]})
    assert "needs gpu3, and the cards here are: gpu0" in ledger.problems[0]
    assert ledger_of(tmp_path, Machine({}, 64 * GIB), {}).workers[0].place == HOST


def test_the_host(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, Machine({}, 6 * GIB), {"device": "cpu"})
    assert "kv_cache_memory_bytes" in ledger.problems[0]


@pytest.mark.parametrize(
    ("worker", "code", "words"),
    [
        ({"gpu_memory": "8GiB"}, 0, ""),
        ({"gpu_memory": "3GiB", "max_model_len": 8192}, 5, "Raise gpu_memory"),
        ({"gpu_memory": "30GiB"}, 5, "more than the card's"),
        ({"gpu_memory_utilization": 1.0}, 5, "lower gpu_memory"),
    ],
)
def test_the_command(worker: Any, code: int, words: str, tmp_path: Path) -> None:
    path = str(fleet_file(tmp_path, worker))
    shown = CliRunner().invoke(plan, [path, "--card-memory", "24GiB"])
    assert shown.exit_code == code, shown.output
    assert "m0-0" in shown.stdout
    assert "of 24.0 GiB taken" in shown.stdout
    if code:
        assert words in shown.stderr
    told = json.loads(CliRunner().invoke(plan, [path, "--card-memory", "24GiB", "--json"]).stdout)
    assert told["fits"] == (code == 0)


def test_a_model_that_is_not_here_is_unknown(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, {}, source="nobody/has-this-model")
    shown = CliRunner().invoke(plan, [str(path), "--card-memory", "24GiB"])
    assert shown.exit_code == 1
    assert "needs the network" in shown.stderr
