"""Bounds in time on what prompts add to a step, with steps that overlap: what is learnt, the same tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_engine import CONFIG
from worker import LLM, SamplingParams
from worker.outputs import CompletionOutput

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=2)
BOUNDS: dict[str, dict[str, float]] = {
    "none": {"tpot_target_ms": 0},
    "tight": {"tpot_target_ms": 0.1},
    "own": {},
}


def clear(answer: CompletionOutput) -> int:
    """Tokens before the first that is nearly a tie, which another order of sums could decide otherwise."""
    tops = [[value for _, value in entry.top] for entry in answer.logprobs or ()]
    return next((i for i, (first, second) in enumerate(tops) if first - second < 1e-3), len(tops))


def test_a_bound_changes_pieces_and_no_tokens(tmp_path: Path) -> None:
    """Long prompts come in pieces beside answers that grow, in sizes that follow the clock."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 8192}))
    rng = random.Random(3)
    lengths = [20] * 8 + [7000, 30, 6000, 40, 7000, 5000]
    prompts = [[rng.randrange(1, 2000) for _ in range(length)] for length in lengths]
    found: dict[str, Any] = {}
    for bound, options in BOUNDS.items():
        with LLM(
            f"random:{path}",
            device="cuda",
            kv_cache_memory_bytes="512MiB",
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            **options,
        ) as llm:
            llm.generate(prompts[:8], GREEDY)  # what decoding takes must be known
            before = llm.stats.steps
            answers = llm.generate(prompts, GREEDY)
            steps = llm.stats.steps - before
            pace = llm._engine.scheduler.pace
            found[bound] = [answer.outputs[0] for answer in answers], steps
            assert 0 < pace.decode < 1
            assert pace.token >= 0
            assert pace.token + pace.read > 0
            assert llm.check_integrity() == ""
    for free, *bounded in zip(found["none"][0], found["tight"][0], found["own"][0], strict=True):
        end = clear(free)
        assert all(other.token_ids[:end] == free.token_ids[:end] for other in bounded)
    assert sum(map(clear, found["none"][0])) > 100
    assert found["tight"][1] > found["none"][1], "the bound was never felt"
