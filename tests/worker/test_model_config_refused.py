"""Configurations that can't be computed: a refusal by name, and never more than that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.model_configs import LLAMA31, MISTRAL, PHI3_128K, QWEN3, QWEN25, SCALING, YARN
from worker.model.config import UnsupportedModel
from worker.model.hf_config import config_from_hf

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (LLAMA31, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen2ForCausalLM"),
    "no architecture": (LLAMA31, {"architectures": None, "model_type": "mamba"}, "mamba"),
    "classifier": (LLAMA31, {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    "awq": (LLAMA31, {"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
    "gptq": (QWEN25, {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    "weights and cache": (
        LLAMA31,
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"num_bits": 8},
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            }
        },
        r"quantization_config \(compressed-tensors\)",
    ),
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
