"""Configurations: every spelling transformers writes, and a refusal by name for what can't be computed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config

from worker.model.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    UnsupportedModel,
    kv_page_bytes,
)
from worker.model.gguf_config import config_from_gguf
from worker.model.hf_config import config_from_hf
from worker.model.shapes import parameter_shapes, weight_bytes

LLAMA31 = {  # meta-llama/Llama-3.1-8B-Instruct, as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25 = {  # Qwen/Qwen2.5-7B-Instruct
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
PHI3_128K = {  # microsoft/Phi-3-mini-128k-instruct, factors shortened to a formula
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0 + i / 100 for i in range(48)],
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
}


def test_llama31() -> None:
    config = config_from_hf(LLAMA31)
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("llama", 128, 8)
    assert config.rope.theta == 500000.0
    assert config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert config.torch_dtype == "bfloat16"
    assert not config.attention_bias
    assert weight_bytes(config, 2) == 16_060_522_496  # the size of its four safetensors files, headers apart


def test_qwen25() -> None:
    config = config_from_hf(QWEN25)
    assert config.attention_bias
    assert not config.output_bias
    assert config.sliding_window is None
    assert config.rope.scaling is None
    assert kv_page_bytes(config, 16, 2) == 2 * 28 * 4 * 16 * 128 * 2
    assert weight_bytes(config, 2) == 15_231_233_024


def test_phi3_128k() -> None:
    config = config_from_hf(PHI3_128K)
    assert config.head_dim == 96
    assert config.sliding_window == 262144
    scaling = config.rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.original_max_position == 4096
    assert scaling.attention_factor == pytest.approx(1.1902380714238083)
    assert "lm_head.weight" in parameter_shapes(config)


@pytest.mark.parametrize(
    "theirs",
    [
        LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, dtype="float16", head_dim=32),
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        MistralConfig(**SHAPE, sliding_window=128, dtype="bfloat16"),
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=64, max_window_layers=0),
        Phi3Config(**SHAPE, sliding_window=2047, rope_parameters={"partial_rotary_factor": 0.5}),
    ],
    ids=lambda theirs: theirs.model_type,
)
def test_what_transformers_saves(theirs: Any, tmp_path: Any) -> None:
    theirs.save_pretrained(tmp_path)
    config = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    head_dim = getattr(theirs, "head_dim", None) or 64
    assert config.head_dim == head_dim
    assert config.rope.rot_dim == head_dim * theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert config.torch_dtype == str(theirs.dtype or "float32").removeprefix("torch.")
    assert config.attention_bias == (getattr(theirs, "attention_bias", False) or theirs.model_type == "qwen2")


SCALING = {**LLAMA31["rope_scaling"]}  # type: ignore[dict-item]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (LLAMA31, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen2ForCausalLM"),
    "no architecture": (LLAMA31, {"architectures": None, "model_type": "mamba"}, "mamba"),
    "classifier": (LLAMA31, {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    "awq": (LLAMA31, {"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
    "gptq": (QWEN25, {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    "activation": (LLAMA31, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "mlp bias": (LLAMA31, {"mlp_bias": True}, "mlp_bias"),
    "yarn": (QWEN25, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
    "dynamic": (LLAMA31, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    "mrope": (QWEN25, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope"),
    "unknown rope": (LLAMA31, {"rope_parameters": {"rope_type": "new"}}, "rope scaling 'new'"),
    "rope by layer": (LLAMA31, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer"),
    "rope factor": (LLAMA31, {"rope_scaling": {**SCALING, "factor": None}}, "rope factor"),
    "rope text": (LLAMA31, {"rope_scaling": "linear"}, "rope_parameters"),
    "rope band": (LLAMA31, {"rope_scaling": {**SCALING, "low_freq_factor": 4.0}}, "low_freq_factor"),
    "partial rotary": (LLAMA31, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "odd rotary": (PHI3_128K, {"partial_rotary_factor": 0.4}, "38 values|short_factor has 48"),
    "factors": (
        PHI3_128K,
        {"rope_scaling": {**PHI3_128K["rope_scaling"], "long_factor": [1.0]}},
        "long_factor",
    ),  # type: ignore[dict-item]
    "factors text": (PHI3_128K, {"rope_scaling": {"type": "longrope", "short_factor": "x"}}, "short_factor"),
    "mixed windows": (QWEN25, {"use_sliding_window": True, "max_window_layers": 14}, "sliding-window"),
    "dtype": (LLAMA31, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "heads": (LLAMA31, {"num_key_value_heads": 5}, "32 attention heads"),
    "no key/value heads": (QWEN25, {"num_key_value_heads": None}, "num_key_value_heads"),
    "head size": (LLAMA31, {"hidden_size": 4100}, "head_dim"),
    "huge": (LLAMA31, {"num_hidden_layers": 10**400}, "num_hidden_layers"),
    "negative": (LLAMA31, {"hidden_size": -1}, "hidden_size"),
    "missing": (LLAMA31, {"vocab_size": None}, "vocab_size"),
    "text": (LLAMA31, {"num_hidden_layers": "32"}, "num_hidden_layers"),
    "epsilon": (LLAMA31, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    base, changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        config_from_hf({**base, **changes})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([LLAMA31, QWEN25, PHI3_128K]),
    data=st.data(),
)
def test_no_value_does_more_than_be_refused(base: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(
        st.sampled_from([*base, "rope_parameters", "layer_types", "dtype", "partial_rotary_factor"])
    )
    inner = base.get(key)
    value: Any = data.draw(json_values)
    if isinstance(inner, dict) and data.draw(st.booleans()):
        value = {**inner, data.draw(st.sampled_from(list(inner))): value}
    try:
        config = config_from_hf({**base, key: value})
    except UnsupportedModel:
        return
    assert config.rope.rot_dim <= config.head_dim


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
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.short == scaling.long == tuple(divisors)
    phi = {k.replace("llama", "phi3"): "phi3" if v == "llama" else v for k, v in GGUF.items()}
    phi |= {"phi3.rope.scaling.original_context_length": 4096, "phi3.rope.scaling.attn_factor": 1.19}
    factors = {"rope_factors_short.weight": [1.0] * 32, "rope_factors_long.weight": [9.0] * 32}
    expected = LongRopeScaling((1.0,) * 32, (9.0,) * 32, 4096, 1.19)
    assert config_from_gguf(phi, EMBEDDING, factors).rope.scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported"),
        ({"general.architecture": None}, "general.architecture"),
        ({"general.architecture": np.array([1, 2])}, "general.architecture"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.attention.head_count_kv": np.array([8, 4])}, "llama.attention.head_count_kv"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
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
