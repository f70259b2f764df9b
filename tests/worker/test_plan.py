"""The memory plan against what real engines report."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from contracts.options import WorkerOptions
from contracts.plan import Answer, Estimate, Question
from tests.conftest import ROOT
from worker.engine.config import EngineError, _check_kv_dtype, resolve
from worker.engine.estimate import estimate
from worker.engine.loop import Engine
from worker.model.shapes import parameter_shapes
from worker.plan import answer
from worker.weights.source import resolve_source

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def config_file(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **fields}))
    return f"random:{path}"


def compare(source: str, **options: Any) -> tuple[Estimate, Engine]:
    """The plan, and an engine that was really loaded."""
    wanted = WorkerOptions.model_validate({"threads": 1, **options})
    found = resolve_source(source)
    card = torch.cuda.get_device_properties(0).total_memory if wanted.device == "cuda" else None
    return estimate(found.config, wanted, card), Engine.load(resolve(found, wanted))


def assert_same_pages(plan: Estimate, engine: Engine) -> None:
    info = engine.info
    assert plan.num_pages == info.num_pages
    assert plan.kv_cache == info.kv_cache_bytes
    assert (plan.page_size, plan.max_model_len) == (info.page_size, info.max_model_len)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_memory_bytes": "3MiB"}, {"num_gpu_blocks_override": 9, "block_size": 32},
     {"max_model_len": 100, "max_num_seqs": 3}, {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": "3MiB"}],
)  # fmt: skip
def test_an_engine_on_a_cpu_takes_what_was_planned(options: Any, tied: bool, tmp_path: Path) -> None:
    source = config_file(tmp_path, tie_word_embeddings=tied)
    plan, engine = compare(source, device="cpu", **options)
    assert_same_pages(plan, engine)
    # Packed for a CPU, a matrix is whole panels of at most 64 rows.
    inner = sum(shape[1] for shape in parameter_shapes(resolve_source(source).config).values() if shape[1:])
    assert 0 <= engine.info.weight_bytes - plan.weights < 64 * 4 * inner


def test_engines_that_start_at_once_take_what_each_would_alone(tmp_path: Path) -> None:
    """Sizes come from budgets, not from what happens to be free."""
    source, options = config_file(tmp_path), {"device": "cpu", "kv_cache_memory_bytes": "48MiB"}
    plan, alone = compare(source, **options)
    with ThreadPoolExecutor(4) as starts:
        together = [starts.submit(compare, source, **options) for _ in range(4)]
        for start in together:
            assert_same_pages(plan, start.result()[1])
    assert_same_pages(plan, alone)


@pytest.mark.model
def test_the_demo_model_takes_what_was_planned(demo_model: Path) -> None:
    plan, engine = compare(str(demo_model), device="cpu", kv_cache_memory_bytes="64MiB")
    assert_same_pages(plan, engine)
    assert abs(plan.weights - engine.info.weight_bytes) <= 0.01 * engine.info.weight_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [512, 2048])
def test_an_engine_on_a_card_takes_what_was_planned(hidden: int, tmp_path: Path) -> None:
    """Weights to the byte; pages within the difference between estimated and measured activations, which
    are never more than estimated."""
    source = config_file(tmp_path, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=8,
                         num_attention_heads=hidden // 64, num_key_value_heads=2, head_dim=64)  # fmt: skip
    plan, engine = compare(source, device="cuda", gpu_memory="6GiB", max_num_seqs=4096)
    assert plan.weights == engine.info.weight_bytes
    spare = engine.info.kv_cache_bytes - plan.kv_cache
    assert 0 <= spare <= plan.activations


def test_what_does_not_fit_is_said_as_the_engine_says_it(tmp_path: Path) -> None:
    source = config_file(tmp_path)
    options = {"device": "cpu", "max_model_len": 4096, "kv_cache_memory_bytes": "64KiB"}
    told = answer(Question(source, options)).problem
    with pytest.raises(EngineError) as raised:
        compare(source, **options)
    assert told == str(raised.value)
    assert "max_model_len" in told


def test_a_page_of_8_bits_takes_half_of_one_of_16(tmp_path: Path) -> None:
    model = resolve_source(config_file(tmp_path)).config
    half, whole = (
        estimate(model, WorkerOptions(kv_cache_dtype=dtype, gpu_memory=256 << 20), 1 << 30)
        for dtype in ("fp8", "bfloat16")
    )
    assert half.kv_cache // half.num_pages * 2 == whole.kv_cache // whole.num_pages
    assert half.num_pages // 2 == whole.num_pages
    assert (half.weights, half.activations) == (whole.weights, whole.activations)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_a_card_that_cant_read_8_bits_is_told_at_start(capability: tuple[int, int]) -> None:
    _check_kv_dtype(torch.bfloat16, capability)
    if capability >= (8, 9):
        _check_kv_dtype(torch.float8_e4m3fn, capability)
        return
    with pytest.raises(EngineError, match=r"kv_cache_dtype fp8 needs .* 8\.9 .*, this one has 8\.[06]"):
        _check_kv_dtype(torch.float8_e4m3fn, capability)


def test_budgets_of_a_card(tmp_path: Path) -> None:
    gib = 1 << 30
    found = resolve_source(config_file(tmp_path))
    for options, budget in (({}, int(0.9 * 24 * gib)), ({"gpu_memory": "2GiB"}, 2 * gib)):
        plan = estimate(found.config, WorkerOptions.model_validate(options), 24 * gib)
        assert plan.budget == budget
        assert plan.weights + plan.activations + plan.kv_cache <= budget
    too_large = answer(Question(config_file(tmp_path), {"gpu_memory": "25GiB"}, 24 * gib))
    assert "more than the card's" in str(too_large.problem)


def test_a_process_answers_in_order_without_torch_and_network(tmp_path: Path) -> None:
    source = config_file(tmp_path)
    questions = [
        {"source": source},
        {"source": "nobody/has-this-model"},
        {"source": str(tmp_path / "none.gguf")},
        {"source": source, "options": {"max_model_len": 9999}},
    ]
    code = "import sys, worker.plan; worker.plan.main(); sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(questions).encode(), capture_output=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    good, unknown, absent, wrong = json.loads(result.stdout)
    told = msgspec.convert(good, Answer)
    assert told == answer(Question(source))
    assert told.estimate is not None
    parts = ("weights", "activations", "kv_cache", "graphs", "context")
    assert told.total == sum(getattr(told.estimate, part) for part in parts)
    assert "local cache" in unknown["unknown"]
    assert "none.gguf" in absent["problem"]
    assert "9999" in wrong["problem"]
