"""Configurations out of the headers of GGUF files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from worker.model.config import (
    DivisorScaling,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    UnsupportedModel,
    YarnScaling,
)
from worker.model.gguf_config import config_from_gguf

GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 16,
    "llama.context_length": 131072,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 8192,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.eos_token_id": 128009,
    "tokenizer.ggml.eot_token_id": 128009,
    "tokenizer.ggml.eom_token_id": 128008,
    "tokenizer.ggml.bos_token_id": 128000,
}


EMBEDDING = {"token_embd.weight": (128256, 2048)}


def from_gguf(changes: dict[str, Any], shapes: dict[str, tuple[int, ...]] = EMBEDDING) -> ModelConfig:
    return config_from_gguf({k: v for k, v in {**GGUF, **changes}.items() if v is not None}, shapes, {})


def test_gguf() -> None:
    config = from_gguf({})
    assert (config.num_layers, config.head_dim, config.vocab_size) == (16, 64, 128256)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (128009, 128008)
    assert config.bos_token_id == 128000
    assert not from_gguf({}, {**EMBEDDING, "output.weight": (128256, 2048)}).tie_word_embeddings
    assert from_gguf({}, {**EMBEDDING, "blk.0.attn_q.bias": (2048,)}).attention_bias


def test_gguf_rope() -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(linear).rope.scaling == LinearScaling(4.0)
    divisors = [1.0] * 20 + [8.0] * 12
    scaling = config_from_gguf(GGUF, EMBEDDING, {"rope_freqs.weight": divisors}).rope.scaling
    assert scaling == DivisorScaling(tuple(divisors))
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32768, "yarn_beta_fast": 16.0}
    yarn = {f"llama.rope.scaling.{key}": value for key, value in yarn.items()}
    assert from_gguf(yarn).rope.scaling == YarnScaling(4.0, 32768, 0.1 * math.log(4) + 1, 16.0)
    attention = {**yarn, "llama.rope.scaling.yarn_attn_factor": 1.5, "llama.rope.scaling.attn_factor": 2.0}
    assert from_gguf(attention).rope.scaling == YarnScaling(4.0, 32768, 3.0, 16.0)
    assert from_gguf(yarn).context_length == 131072
    phi = {k.replace("llama", "phi3"): "phi3" if v == "llama" else v for k, v in GGUF.items()}
    phi |= {"phi3.rope.scaling.original_context_length": 4096, "phi3.rope.scaling.attn_factor": 1.19}
    factors = {"rope_factors_short.weight": [1.0] * 32, "rope_factors_long.weight": [9.0] * 32}
    expected = LongRopeScaling((1.0,) * 32, (9.0,) * 32, 4096, 1.19)
    assert config_from_gguf(phi, EMBEDDING, factors).rope.scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; supported: llama, qwen2, qwen3, phi3"),
        ({"general.architecture": None}, "general.architecture"),
        ({"general.architecture": np.array([1, 2])}, "general.architecture"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.attention.head_count_kv": np.array([8, 4])}, "llama.attention.head_count_kv"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor"),
        (
            {"llama.rope.scaling.type": "ntk"},
            "'ntk' is not supported; supported: none, linear, yarn, longrope",
        ),
        ({"llama.rope.dimension_sections": np.array([16, 24, 24, 0])}, "llama.rope.dimension_sections"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5"),
        ({"llama.attention.sliding_window_pattern": 4}, "sliding_window_pattern"),
        ({"llama.rope.scaling.type": np.array([1.0, 2.0])}, "rope.scaling.type"),
        ({"llama.attention.value_length": 128}, "value_length"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon"),
    ],
)
def test_gguf_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        from_gguf(changes)


def test_gguf_without_embedding() -> None:
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight"):
        from_gguf({}, {})
