"""The engine on the card: float32 agrees with the CPU token by token; graphs agree with eager; bf16 stays
close."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from worker import LLM, SamplingParams
from worker.model.layers import CausalLM

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"random:{path}"


@contextmanager
def on_cpu(source: str, **options: object) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "pack", lambda model: None)  # its weights are needed as they are
        llm = LLM(source, device="cpu", kv_cache_memory_bytes="64MiB", threads=2, **options)
    with llm:
        for parameter in llm._engine.runner.model.parameters():
            if parameter.ndim == 2:
                with torch.inference_mode():
                    parameter.mul_(3.0)  # larger weights: tokens that differ from each other
        yield llm


@pytest.fixture(scope="module")
def cpu(source: str) -> Iterator[LLM]:
    with on_cpu(source) as llm:
        yield llm


def on_gpu(cpu: LLM, source: str, **options: object) -> LLM:
    llm = LLM(source, device="cuda", kv_cache_memory_bytes="64MiB", threads=2, **options)
    for mine, theirs in zip(llm._engine.runner.model.parameters(), cpu._engine.runner.model.parameters()):
        with torch.inference_mode():
            mine.copy_(theirs)
    return llm


def prompts(count: int = 24) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1, 2000) for _ in range(rng.randrange(1, 300))] for _ in range(count)]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    llm.reset_prefix_cache()
    result = [r.outputs[0].token_ids for r in llm.generate(prompts(), params)]
    assert llm.check_integrity() == ""
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 64},  # chunks in graphs with a place to decode for each of their rows
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"max_num_seqs": 5},
        {"num_gpu_blocks_override": 48},
    ],
    ids=str,
)
def test_float32_tokens_equal_the_cpu_s(cpu: LLM, source: str, options: dict[str, object]):
    want = tokens(cpu)
    assert len({t for row in want for t in row}) > 20
    with on_gpu(cpu, source, **options) as llm:
        assert tokens(llm) == want
        assert tokens(llm) == want
        if "num_gpu_blocks_override" in options:
            assert llm.stats.preemptions > 0


def test_seeds_give_the_same_on_both_devices(cpu: LLM, source: str):
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=40, seed=5, max_tokens=24, ignore_eos=True,
        presence_penalty=0.5, repetition_penalty=1.1,
    )  # fmt: skip
    with on_gpu(cpu, source) as llm:
        assert tokens(llm, params) == tokens(cpu, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_equal_eager(cpu: LLM, source: str, dtype: str):
    with on_gpu(cpu, source, dtype=dtype, enforce_eager=True) as eager:
        want = tokens(eager)
    with on_gpu(cpu, source, dtype=dtype) as graphs:
        got = tokens(graphs)
    same = sum(a == b for a, b in zip(want, got))
    # Padding changes the shapes of the products, so the last bit may differ and a near tie may fall the other
    # way.
    assert same >= len(want) * 0.7


def test_layers_of_two_windows_start_with_empty_caches_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a later layer launches is compiled before graphs are captured, not within a capture."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    window = {"use_sliding_window": True, "sliding_window": 56, "max_window_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **window}))
    source = f"random:{path}"
    with on_cpu(source) as cpu, on_gpu(cpu, source) as llm:
        assert llm._engine.runner.model.config.leading_layers == 3
        assert tokens(llm) == tokens(cpu)


def test_padding_rows_of_a_graph_write_nothing(cpu: LLM, source: str):
    """Batch 5 in a graph of 8: pages nobody holds stay as they are, bit for bit."""
    with on_gpu(cpu, source) as llm:
        pool = llm._engine.runner.kv_cache.pool
        with torch.inference_mode():
            pool.fill_(torch.nan)
        llm.generate(prompts(5), GREEDY)
        scheduler = llm._engine.scheduler
        touched = set(scheduler.pool._hash_of) | {0}
        used = [p for p in range(scheduler.pool.num_pages) if not torch.isnan(pool[:, :, p]).all()]
        # Every page written belonged to one of the five: their prompts and answers, no more.
        most = sum(-(-(len(p) + GREEDY.max_tokens) // llm.info.page_size) for p in prompts(5))
        assert len(used) <= most
        assert touched - {0} <= set(used)


def test_storm_of_aborts_leaves_every_page_free(cpu: LLM, source: str):
    from worker.ipc.messages import EngineRequest

    rng = random.Random(3)
    with on_gpu(cpu, source, num_gpu_blocks_override=100, max_num_seqs=16) as llm:
        engine = llm._engine
        alive: list[str] = []
        for i in range(600):
            prompt = [rng.randrange(2000) for _ in range(rng.randrange(1, 200))]
            params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40), ignore_eos=True)
            assert engine.add(EngineRequest(str(i), prompt, params, i)) is None
            alive.append(str(i))
            for output in engine.step():
                if output.finish_reason:
                    alive.remove(output.request_id)
            if rng.random() < 0.4 and alive:
                engine.abort(alive.pop(rng.randrange(len(alive))))
        while engine.has_work:
            engine.step()
        assert engine.check_integrity() == ""


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_prompt_logprobs_and_bad_words_with_steps_in_flight(
    cpu: LLM, source: str, enforce_eager: bool
) -> None:
    """As on the CPU, which never overlaps steps; by graphs, in chunks, with few pages."""
    rng = random.Random(9)
    prompts = [[rng.randrange(1, 2000) for _ in range(rng.randrange(20, 200))] for _ in range(24)]
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    said = [result.outputs[0].token_ids for result in cpu.generate(prompts, plain)]
    banned = [((t[4], t[5]), (t[10], t[11], t[12])) for t in said]
    each = [
        SamplingParams(
            temperature=0,
            max_tokens=30,
            ignore_eos=True,
            prompt_logprobs=i % 4 if i % 3 else None,
            bad_words_token_ids=banned[i] if i % 2 else (),
        )
        for i in range(len(prompts))
    ]
    want = cpu.generate(prompts, each)
    options = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 200}
    with on_gpu(cpu, source, enforce_eager=enforce_eager, **options) as llm:
        for found, expected, params in zip(llm.generate(prompts, each), want, each):
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids
            if params.prompt_logprobs is None:
                continue
            for mine, theirs in zip(found.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None and theirs is not None:
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert llm.check_integrity() == ""
