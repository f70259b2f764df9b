"""Rotary tables: float32 values of float64 angles, and every scaling equal to transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.model.config import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)
from worker.model.hf_config import config_from_hf
from worker.model.rope import cos_sin_table, first_row, inverse_frequencies

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.01 * i for i in range(24)],
    "long_factor": [1.0 + 2.5 * i for i in range(24)],
}


def test_position_30000_equals_float64() -> None:
    for theta in (10_000.0, 500_000.0, 1_000_000.0):
        table = cos_sin_table(RopeConfig(theta, 128), 30_001)
        assert table.dtype == torch.float32
        for i in range(64):
            angle = 30_000 * theta ** (-2 * i / 128)
            assert table[30_000, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert table[30_000, 64 + i].item() == pytest.approx(math.sin(angle), abs=1e-7)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "values",
    [
        LLAMA3,
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        YARN,
        {**YARN, "rope_theta": 10000.0, "beta_fast": 48, "beta_slow": 2},
        {**YARN, "truncate": False},
        {**YARN, "original_max_position_embeddings": 10},  # both ends of the ramp below the first pair
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        {**YARN, "factor": None},
    ],
    ids=str,
)
def test_scaling_equals_transformers(values: dict[str, Any]) -> None:
    theirs = LlamaConfig(**SHAPE, max_position_embeddings=131072, rope_parameters=dict(values))
    expected, scale = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, "cpu")
    ours = config_from_hf(theirs.to_dict()).rope
    assert ours.scaling is not None
    torch.testing.assert_close(inverse_frequencies(ours, 4096).float(), expected, rtol=2e-6, atol=0)
    assert cos_sin_table(ours, 1)[0, 0].item() == pytest.approx(scale)


@pytest.mark.parametrize("length", [1, 4096, 4097, 9000, 16384])
def test_dynamic_equals_transformers_at_every_length(length: int) -> None:
    values = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    theirs = LlamaConfig(**SHAPE, max_position_embeddings=4096, rope_parameters=dict(values))
    expected, scale = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=length)
    assert scale == 1.0
    ours = config_from_hf(theirs.to_dict()).rope
    torch.testing.assert_close(inverse_frequencies(ours, length).float(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("max_model_len", "uses"), [(4096, "short_factor"), (4097, "long_factor")])
def test_longrope_factors_by_length(max_model_len: int, uses: str) -> None:
    theirs = Phi3Config(
        **SHAPE,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=dict(LONG),
        pad_token_id=None,
    )
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=max_model_len)
    ours = config_from_hf(theirs.to_dict()).rope
    assert ours.rot_dim == 48
    frequencies = inverse_frequencies(ours, max_model_len)
    torch.testing.assert_close(frequencies.float(), expected, rtol=1e-6, atol=0)
    plain = torch.tensor([10000 ** (-i / 24) for i in range(24)], dtype=torch.float64)
    torch.testing.assert_close(frequencies, plain / torch.tensor(LONG[uses], dtype=torch.float64))

    assert scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    table, first = cos_sin_table(ours, max_model_len), first_row(ours, max_model_len, max_model_len)
    assert table.shape == (max_model_len + first, 48)
    angles = 3000 * frequencies
    torch.testing.assert_close(table[first + 3000], (torch.cat([angles.cos(), angles.sin()]) * scale).float())


def test_sequences_that_stay_short_are_rotated_as_such() -> None:
    """Two tables, one after another; which one tells the longest that a sequence may get."""
    rope = RopeConfig(10_000.0, 64, DynamicScaling(2.0, 100))
    table = cos_sin_table(rope, 180)
    assert table.shape == (280, 64)
    torch.testing.assert_close(table[:100], cos_sin_table(RopeConfig(10_000.0, 64), 100))
    assert [first_row(rope, 180, length) for length in (1, 100, 101, 180)] == [0, 0, 100, 100]
    assert not torch.equal(table[:100], table[100:200])
    assert first_row(rope, 100, 100) == first_row(RopeConfig(10_000.0, 64), 180, 180) == 0
    assert cos_sin_table(rope, 100).shape == (100, 64)


def test_yarn_keeps_high_and_divides_low_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(1e6, 128), 1)
    scaled = inverse_frequencies(RopeConfig(1e6, 128, YarnScaling(4.0, 32768, 1.0)), 1)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 4
    assert bool((scaled[1:] <= scaled[:-1]).all())


def test_linear_divides_positions() -> None:
    plain = cos_sin_table(RopeConfig(10_000.0, 64), 100)
    scaled = cos_sin_table(RopeConfig(10_000.0, 64, LinearScaling(4.0)), 400)
    torch.testing.assert_close(scaled[::4], plain)


def test_llama3_keeps_high_and_stretches_low_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(500_000.0, 128), 1)
    scaled = inverse_frequencies(RopeConfig(500_000.0, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192)), 1)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    assert bool((scaled <= plain).all())


def test_divisors_of_a_gguf_hold_at_any_length() -> None:
    divisors = tuple(1.0 + i for i in range(32))
    rope = RopeConfig(10_000.0, 64, DivisorScaling(divisors))
    torch.testing.assert_close(inverse_frequencies(rope, 100), inverse_frequencies(rope, 10_000))
