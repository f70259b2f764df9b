"""Configurations: every spelling transformers writes, and a refusal by name for what can't be computed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from contracts.options import WorkerOptions
from worker.engine.sizes import EngineError, resolve_sizes
from worker.model.config import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    UnsupportedModel,
    YarnScaling,
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
QWEN3 = {  # Qwen/Qwen3-4B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL = {  # mistralai/Mistral-7B-v0.1
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
PHI4_MINI = {  # microsoft/Phi-4-mini-instruct, factors shortened to a formula
    **PHI3_128K,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
SCALING = {**LLAMA31["rope_scaling"]}  # type: ignore[dict-item]
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
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


@pytest.mark.parametrize(("full", "leading"), [(0, 1), (1, 2), (5, 6), (28, 1)])
def test_leading_layers_have_one_of_each_window(full: int, leading: int) -> None:
    """Their kernels are compiled before graphs are captured: none may be compiled within a capture."""
    window = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": full}
    config = config_from_hf({**QWEN25, **window})
    assert config.leading_layers == leading
    seen = {config.window(layer) for layer in range(leading)}
    assert seen == {config.window(layer) for layer in range(config.num_layers)}


def test_phi3_128k() -> None:
    config = config_from_hf(PHI3_128K)
    assert config.head_dim == 96
    assert config.sliding_window == 262144
    scaling = config.rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.original_max_position == 4096
    assert scaling.attention_factor == pytest.approx(1.1902380714238083)
    assert "lm_head.weight" in parameter_shapes(config)


def test_phi4_mini() -> None:
    config = config_from_hf(PHI4_MINI)
    assert (config.head_dim, config.rope.rot_dim, config.num_kv_heads) == (128, 96, 8)
    assert config.context_length == 131072
    assert weight_bytes(config, 2) == 7_672_043_520  # 3,836,021,760 parameters


def test_qwen3() -> None:
    config = config_from_hf(QWEN3)
    assert config.qk_norm
    assert not config.attention_bias
    assert parameter_shapes(config)["layers.35.k_norm.weight"] == (128,)
    assert weight_bytes(config, 2) == 8_044_936_192
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert config_from_hf(without).head_dim == 128


def test_mistral() -> None:
    config = config_from_hf(MISTRAL)
    assert config.architecture == "mistral"
    assert config.window(31) == config.sliding_window == 4096
    without = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert config_from_hf(without).sliding_window == 4096
    assert config_from_hf({**MISTRAL, "sliding_window": None}).sliding_window is None


def test_windows_that_differ_by_layer() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 4096}
    config = config_from_hf({**QWEN25, **sliding, "max_window_layers": 21})
    assert [config.window(i) for i in range(28)] == [0] * 21 + [4096] * 7
    kinds = ["full_attention", "sliding_attention"] * 14
    config = config_from_hf({**QWEN25, **sliding, "layer_types": kinds})
    assert [config.window(i) for i in range(28)] == [0, 4096] * 14
    assert config_from_hf({**QWEN25, **sliding}).sliding_window is None  # 28 layers, the first 28 without
    assert config_from_hf({**QWEN25, "layer_types": ["full_attention"] * 28}).sliding_window is None


@pytest.mark.parametrize(
    ("base", "rope", "length"),
    [
        (QWEN25, None, 32768),
        (QWEN25, YARN, 131072),
        (QWEN3, YARN, 131072),
        (QWEN3, {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768}, 40960),
        (MISTRAL, {"type": "linear", "factor": 2.0}, 65536),
        (MISTRAL, {"rope_type": "dynamic", "factor": 2.5}, 81920),
        (LLAMA31, SCALING, 131072),
        (PHI3_128K, PHI3_128K["rope_scaling"], 131072),
    ],
)
def test_longest_sequence(base: dict[str, Any], rope: dict[str, Any] | None, length: int) -> None:
    assert config_from_hf({**base, "rope_scaling": rope}).context_length == length


def test_more_than_the_longest_is_refused_with_the_reason() -> None:
    config = config_from_hf({**QWEN25, "rope_scaling": YARN})
    assert resolve_sizes(config, WorkerOptions(max_model_len=131072), on_gpu=False).max_model_len == 131072
    reason = r"131073 is longer than the 131072 .*max_position_embeddings 32768, yarn rope scaling"
    with pytest.raises(EngineError, match=reason):
        resolve_sizes(config, WorkerOptions(max_model_len=131073), on_gpu=False)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_older_names_of_longrope_in_phi3(kind: str) -> None:
    named = {**PHI3_128K["rope_scaling"], "type": kind}  # type: ignore[dict-item]
    assert config_from_hf({**PHI3_128K, "rope_scaling": named}) == config_from_hf(PHI3_128K)


def test_yarn_spellings() -> None:
    expected = YarnScaling(4.0, 32768, 0.1 * math.log(4) + 1)
    new = {**QWEN25, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}, "rope_theta": None}
    for config in ({**QWEN25, "rope_scaling": {**YARN, "attn_factor": 1, "finetuned": True}}, new):
        rope = config_from_hf(config).rope
        assert (rope.scaling, rope.theta) == (expected, 1e6)
    details = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5}
    scaling = config_from_hf({**QWEN25, "rope_scaling": {**YARN, **details}}).rope.scaling
    assert scaling == YarnScaling(4.0, 32768, 1.5, 16.0, 2.0, False)
    scales = {"mscale": 1.0, "mscale_all_dim": 0.5}
    scaling = config_from_hf({**QWEN25, "rope_scaling": {**YARN, **scales}}).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize("values", [{}, {"num_experts": 0}, {"logit_scale": 1.0}, {"use_mrope": False}])
def test_keys_that_change_nothing(values: dict[str, Any]) -> None:
    assert config_from_hf({**QWEN3, **values, "use_qk_norm": True}) == config_from_hf(QWEN3)


@pytest.mark.parametrize(
    "theirs",
    [
        LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, dtype="float16", head_dim=32),
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        MistralConfig(**SHAPE, sliding_window=128, dtype="bfloat16"),
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=64, max_window_layers=0),
        Qwen3Config(**SHAPE, attention_bias=True, tie_word_embeddings=True, head_dim=96),
        LlamaConfig(
            **SHAPE, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5}, head_dim=80
        ),
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
    assert config.qk_norm == (theirs.model_type == "qwen3")
    assert config.architecture == theirs.model_type


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (LLAMA31, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen2ForCausalLM"),
    "no architecture": (LLAMA31, {"architectures": None, "model_type": "mamba"}, "mamba"),
    "classifier": (LLAMA31, {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    "awq": (LLAMA31, {"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
    "gptq": (QWEN25, {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    "activation": (LLAMA31, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "mlp bias": (LLAMA31, {"mlp_bias": True}, "mlp_bias"),
    "softcapping": (
        LLAMA31,
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping 50.0 is not supported",
    ),
    "scaled embedding": (LLAMA31, {"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
    "scaled logits": (QWEN25, {"logits_scaling": 8.0}, "logits_scaling 8.0"),
    "experts": (QWEN25, {"num_experts": 64}, "num_experts 64"),
    "norm of queries": (LLAMA31, {"use_qk_norm": True}, "use_qk_norm True"),
    "mistral bias": (MISTRAL, {"attention_bias": True}, "attention_bias True"),
    "phi3 bias": (PHI3_128K, {"attention_bias": True}, "attention_bias True"),
    "bias text": (LLAMA31, {"attention_bias": "yes"}, "attention_bias must be true or false"),
    "rope parameter": (LLAMA31, {"rope_scaling": {**SCALING, "alpha": 1000}}, "rope alpha 1000"),
    "yarn weight": (QWEN25, {"rope_scaling": {**YARN, "attn_factor": 0.5}}, "rope attn_factor 0.5"),
    "yarn theta": (QWEN25, {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta above 1"),
    "yarn without factor": (QWEN25, {"rope_scaling": {"type": "yarn"}}, "rope factor must be"),
    "yarn factor": (QWEN25, {"rope_scaling": {**YARN, "factor": -1}}, "rope factor"),
    "dynamic factor": (LLAMA31, {"rope_scaling": {"rope_type": "dynamic"}}, "rope factor"),
    "longrope of two": (
        PHI3_128K,
        {"rope_scaling": {**PHI3_128K["rope_scaling"], "short_mscale": 1.1}},
        "rope short_mscale 1.1",
    ),
    "mrope": (QWEN25, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope"),
    "unknown rope": (QWEN25, {"rope_parameters": {"rope_type": "new"}}, "rope scaling 'new'"),
    "rope by layer": (QWEN25, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer"),
    "rope twice": (LLAMA31, {"rope_parameters": {"rope_type": "default"}}, "rope_scaling are both there"),
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
    "linear layers": (
        QWEN25,
        {"layer_types": ["linear_attention"] * 28},
        "layer_types has 'linear_attention'",
    ),
    "few layer types": (
        QWEN25,
        {"layer_types": ["full_attention"]},
        r"layer_types .* num_hidden_layers \(28\)",
    ),
    "window of none": (QWEN25, {"layer_types": ["sliding_attention"] * 28}, "layer_types has 'sliding_att"),
    "mistral's full layers": (MISTRAL, {"layer_types": ["full_attention"] * 32}, "layer_types has 'full_att"),
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
    base=st.sampled_from([LLAMA31, QWEN25, PHI3_128K, QWEN3, MISTRAL]),
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
