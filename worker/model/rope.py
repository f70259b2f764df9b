"""Rotary embedding tables (RoFormer, arXiv 2104.09864) in float32, from angles computed in float64.

Float32 angles are off by 1e-3 rad at position 30,000, bfloat16 ones by whole turns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> Tensor:
    """Radians a position adds to each rotated pair: [rot_dim / 2] float64.

    `max_model_len` decides between longrope's short and long factors: once, when the model is loaded, so that
    a request that grows past the original length keeps the rotation its cached keys were written with.
    """
    exponents = torch.arange(0, rope.rot_dim, 2, dtype=torch.float64) / rope.rot_dim
    frequencies = rope.theta**-exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case LongRopeScaling(short, long, original, _):
            factors = short if max_model_len <= original else long
            return frequencies / torch.tensor(factors, dtype=torch.float64)


def cos_sin_table(rope: RopeConfig, max_model_len: int, device: torch.device | str = "cpu") -> Tensor:
    """[max_model_len, rot_dim] float32: row p holds the cosines of position p's angles, then their sines."""
    positions = torch.arange(max_model_len, dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(rope, max_model_len))
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, LongRopeScaling) else 1.0
    half = rope.rot_dim // 2
    table = torch.empty(max_model_len, rope.rot_dim, dtype=torch.float32)
    table[:, :half] = angles.cos().mul_(scale)
    table[:, half:] = angles.sin_().mul_(scale)
    return table.to(device)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths above original/low_freq_factor are stretched, below original/high_freq_factor kept."""
    turns = frequencies * scaling.original_max_position / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
