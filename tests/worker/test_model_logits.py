"""Llama, Mistral, Qwen2 and Phi-3 against transformers' classes: the same checkpoint, logits and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.worker.paged import PagedRun, one_thread
from tests.worker.random_models import randomise
from worker.model.layers import CausalLM
from worker.weights.loader import load_model
from worker.weights.source import resolve_source

VOCAB = 1000
LENGTH = 90  # tokens of the compared text: several pages, and more than the windows below
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shape(hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    return {**BASE, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.02 * i for i in range(36)],
    "long_factor": [1.0 + 0.7 * i for i in range(36)],
}
SWA = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}

# name -> (class, configuration, max_model_len)
MODELS: dict[str, tuple[type[nn.Module], Any, int]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**shape(384, 1024, 6, 2)), 512),
    "llama tied, no grouping": (
        LlamaForCausalLM,
        LlamaConfig(**shape(256, 688, 4, 4, tie_word_embeddings=True)),
        512,
    ),
    "llama biases, llama3 rope, head_dim 128": (
        LlamaForCausalLM,
        LlamaConfig(
            **shape(256, 512, 8, 1, head_dim=128, attention_bias=True, rope_parameters=dict(LLAMA3_ROPE))
        ),
        512,
    ),
    "llama linear rope": (
        LlamaForCausalLM,
        LlamaConfig(
            **shape(256, 512, 4, 1, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
        ),
        512,
    ),
    "mistral window": (MistralForCausalLM, MistralConfig(**shape(256, 512, 4, 2, sliding_window=24)), 512),
    "qwen2 7:1": (Qwen2ForCausalLM, Qwen2Config(**shape(448, 1024, 7, 1)), 512),
    "qwen2 tied, window": (
        Qwen2ForCausalLM,
        Qwen2Config(**shape(256, 512, 4, 2, tie_word_embeddings=True, **SWA)),
        512,
    ),
    "phi3 window, head_dim 96": (
        Phi3ForCausalLM,
        Phi3Config(**shape(384, 1024, 4, 4, sliding_window=24)),
        512,
    ),
    "phi3 longrope short, partial": (
        Phi3ForCausalLM,
        Phi3Config(
            **shape(384, 512, 4, 2, original_max_position_embeddings=128, rope_parameters=dict(LONGROPE))
        ),
        128,
    ),
    "phi3 longrope long, partial": (
        Phi3ForCausalLM,
        Phi3Config(
            **shape(384, 512, 4, 2, original_max_position_embeddings=64, rope_parameters=dict(LONGROPE))
        ),
        512,
    ),
}


class Pair:
    """A checkpoint on disk, loaded by transformers and by us."""

    def __init__(self, name: str, directory: Path) -> None:
        cls, config, max_model_len = MODELS[name]
        self.theirs = cls(config).eval()
        randomise(self.theirs)
        shards = {"max_shard_size": "1MB"} if name == "llama" else {}
        self.theirs.save_pretrained(directory, **shards)
        assert (directory / "model.safetensors.index.json").exists() == bool(shards)
        source = resolve_source(str(directory))
        self.ours = load_model(source, dtype=torch.float32, device="cpu", max_model_len=max_model_len)
        self.tokens: list[int] = torch.randint(
            0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)
        ).tolist()
        self.expected = self.their_logits(self.tokens)

    @torch.no_grad()
    def their_logits(self, tokens: list[int]) -> Tensor:
        return self.theirs(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("checkpoint"))


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error.item() < 1e-4


def chunks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def test_logits_at_once_by_chunks_and_by_tokens(pair: Pair) -> None:
    run = PagedRun(pair.ours)
    assert_close(run.feed({"all": pair.tokens})["all"], pair.expected)
    mixed = [16, 7, 1, 1, 40, 1, 15, 9]
    for name, sizes in {"mixed": mixed, "tokens": [1] * 48}.items():
        found = torch.cat([run.feed({name: part})[name] for part in chunks(pair.tokens, sizes)])
        assert_close(found, pair.expected[: sum(sizes)])


def test_sequences_in_one_batch_dont_meet(pair: Pair) -> None:
    run = PagedRun(pair.ours)
    reverse = pair.tokens[::-1]
    run.feed({"a": pair.tokens[:33], "b": reverse[:5]})
    found = run.feed({"a": pair.tokens[33:34], "b": reverse[5:], "c": pair.tokens[:20]})
    assert_close(found["a"], pair.expected[33:34])
    assert_close(found["c"], pair.expected[:20])
    assert_close(found["b"], pair.their_logits(reverse)[5:])


@torch.inference_mode()
def test_states_of_some_tokens_only(pair: Pair) -> None:
    """They are the same, and so is what the cache holds for later steps."""
    run, other = PagedRun(pair.ours), PagedRun(pair.ours)
    tokens, rows = torch.tensor(pair.tokens[:20]), torch.tensor([19, 4])
    every = pair.ours.forward(tokens, run.batch(["s"], [20]), run.caches)
    some = pair.ours.forward(tokens, other.batch(["s"], [20]), other.caches, rows)
    torch.testing.assert_close(some, every[rows], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(run.caches[-1], other.caches[-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


def test_greedy_tokens(pair: Pair) -> None:
    original = getattr(pair.theirs.config, "original_max_position_embeddings", 0)
    # transformers changes longrope's factors where the original length is crossed; start beyond it.
    prompt = pair.tokens[:70] if original == 64 else pair.tokens[:12]
    run, new, found = PagedRun(pair.ours), prompt, list[int]()
    for _ in range(40):
        new = [int(run.feed({"s": new})["s"][-1].argmax())]
        found += new
    # One pass over our text gives every token their greedy choice would take, up to the first that differs.
    best = pair.their_logits(prompt + found)[len(prompt) - 1 : -1].topk(2)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    clear = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(gaps))
    assert found[:clear] == best.indices[:clear, 0].tolist()
    assert len(set(found[:clear])) >= 20


def test_fills_every_parameter(pair: Pair) -> None:
    ours: CausalLM = pair.ours
    count = sum(p.numel() for p in pair.theirs.parameters())
    assert sum(p.numel() for p in ours.parameters()) == count
    assert ours.weight_bytes == 4 * count
