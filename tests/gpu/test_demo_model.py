"""The real model on the card: in float32 its greedy tokens are transformers' on a CPU, one for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(400)]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_float32_tokens_are_the_cpu_s(demo_model: Path, reference_tokens: Path, enforce_eager: bool) -> None:
    """Each prompt alone, all in one batch, and again from cached prefixes."""
    prompts: list[dict[str, Any]] = json.loads(reference_tokens.read_text())["prompts"]
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "512MiB", "max_num_seqs": 64}
    with LLM(str(demo_model), device="cuda", enforce_eager=enforce_eager, **options) as llm:
        for together in ([[p] for p in prompts], [prompts], [prompts]):
            for group in together:
                results = llm.generate([p["prompt_ids"] for p in group], GREEDY)
                for result, prompt in zip(results, group, strict=True):
                    assert result.outputs[0].token_ids == prompt["greedy_ids"], prompt["name"]
        assert llm.check_integrity() == ""
