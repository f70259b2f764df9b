"""Embeddings on the card: those of the CPU, beside answers, with steps overlapped and in graphs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.test_engine import CONFIG, GREEDY
from worker import LLM
from worker.ipc.messages import EngineRequest
from worker.model.layers import CausalLM
from worker.params import SamplingParams

pytestmark = pytest.mark.gpu
VOCABULARY = 2000


def prompts(count: int = 24) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 900))] for _ in range(count)]


def embedder(source: str, kind: str, weights: LLM | None = None, **options: Any) -> LLM:
    """With the weights of another, if there is one."""
    fixed: dict[str, Any] = {"kv_cache_memory_bytes": "64MiB", "threads": 2, "runner": "pooling"}
    llm = LLM(source, pooling_type=kind, **fixed, **options)
    if weights is not None:
        theirs = weights._engine.runner.model.parameters()
        for mine, other in zip(llm._engine.runner.model.parameters(), theirs):
            with torch.inference_mode():
                mine.copy_(other)
    return llm


def vectors(llm: LLM) -> np.ndarray:
    found = np.array([result.outputs.embedding for result in llm.embed(prompts())])
    assert llm.check_integrity() == ""
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"random:{path}"


@pytest.fixture(scope="module", params=["last", "mean"])
def cpu(request: pytest.FixtureRequest, source: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "pack", lambda model: None)  # its weights are needed as they are
        llm = embedder(source, request.param, device="cpu")
    with llm:
        yield llm


@pytest.mark.parametrize(
    "options",
    [{"enforce_eager": True}, {}, {"max_num_batched_tokens": 64, "max_num_seqs": 16}],
    ids=["eager", "graphs", "chunks"],
)
def test_vectors_are_those_of_the_cpu(cpu: LLM, source: str, options: dict[str, Any]) -> None:
    assert cpu.info.pooling is not None
    expected = vectors(cpu)
    with embedder(source, cpu.info.pooling.type, cpu, device="cuda", **options) as llm:
        for _ in range(2):  # the second time on cached pages
            assert np.abs(vectors(llm) - expected).max() < 1e-3


def test_beside_answers(source: str) -> None:
    with embedder(source, "mean", device="cuda") as llm:
        alone = vectors(llm)
        engine = llm._engine
        pooled: dict[str, bytes | None] = {}
        tokens: dict[str, int] = {}
        for i, prompt in enumerate(prompts()):
            engine.add(EngineRequest(f"e{i}", prompt, SamplingParams(), 0, pooling="mean"))
            engine.add(EngineRequest(f"a{i}", prompt[:100], GREEDY, 0))
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.token_ids)
                pooled[output.request_id] = output.pooled
        assert llm.check_integrity() == ""
        for i, vector in enumerate(alone):
            found = np.frombuffer(pooled[f"e{i}"] or b"", "<f4")
            assert np.abs(found / np.linalg.norm(found) - vector).max() < 1e-3
            assert tokens[f"a{i}"] == GREEDY.max_tokens
