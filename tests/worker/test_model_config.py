"""Configurations: every spelling transformers writes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from contracts.options import WorkerOptions
from tests.worker.model_configs import LLAMA31, MISTRAL, PHI3_128K, PHI4_MINI, QWEN3, QWEN25, SCALING, YARN
from worker.engine.sizes import EngineError, resolve_sizes
from worker.model.config import (
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    kv_page_bytes,
)
from worker.model.hf_config import config_from_hf
from worker.model.shapes import parameter_shapes, weight_bytes

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


def test_scales_for_the_cache_alone_change_nothing() -> None:
    scales = {
        "quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    }  # fmt: skip
    assert config_from_hf({**LLAMA31, "quantization_config": scales}) == config_from_hf(LLAMA31)


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
