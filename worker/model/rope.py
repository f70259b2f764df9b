"""Rotary embedding tables (RoFormer, arXiv 2104.09864) in float32, from angles computed in float64.

Float32 angles are off by 1e-3 rad at position 30,000, bfloat16 ones by whole turns.

Two scalings (longrope, dynamic NTK) rotate long sequences by other frequencies than short ones. Where a
sequence grows past the original length, transformers rotates new tokens by the new frequencies and leaves
the cached ones as they are; vLLM rotates everything by the long ones as soon as max_model_len is above the
original length. Here a request is told by the longest it may get, once, when it comes in: one that fits the
original length is rotated as transformers rotates it; one that may not, by the frequencies of max_model_len
from its first token on, as transformers rotates a text of that length. Both tables lie one after another in
one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.config import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(rope: RopeConfig, length: int) -> Tensor:
    """Radians a position adds to each rotated pair of a sequence that may get `length` tokens long:
    [rot_dim / 2] float64."""
    match rope.scaling:
        case None:
            return _frequencies(rope.theta, rope.rot_dim)
        case LinearScaling(factor):
            return _frequencies(rope.theta, rope.rot_dim) / factor
        case DynamicScaling():
            return _dynamic(rope, rope.scaling, length)
        case YarnScaling():
            return _yarn(rope, rope.scaling)
        case Llama3Scaling():
            return _llama3(_frequencies(rope.theta, rope.rot_dim), rope.scaling)
        case LongRopeScaling(short, long, original, _):
            return _divided(rope, short if length <= original else long)
        case DivisorScaling(divisors):
            return _divided(rope, divisors)


def cos_sin_table(rope: RopeConfig, max_model_len: int, device: torch.device | str = "cpu") -> Tensor:
    """[rows, rot_dim] float32: row `first_row(…) + p` holds the cosines of position p's angles, then their
    sines, for sequences of up to `max_model_len` tokens."""
    switch = rope.switch
    if switch is None or max_model_len <= switch:
        return _table(rope, max_model_len).to(device)
    return torch.cat([_table(rope, switch), _table(rope, max_model_len)]).to(device)


def first_row(rope: RopeConfig, max_model_len: int, length: int) -> int:
    """Where position 0 of a sequence that may get `length` tokens long lies in the table."""
    switch = rope.switch
    return 0 if switch is None or max_model_len <= switch or length <= switch else switch


def _table(rope: RopeConfig, length: int) -> Tensor:
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(rope, length))
    scaling, half = rope.scaling, rope.rot_dim // 2
    scale = scaling.attention_factor if isinstance(scaling, LongRopeScaling | YarnScaling) else 1.0
    table = torch.empty(length, rope.rot_dim, dtype=torch.float32)
    table[:, :half] = angles.cos().mul_(scale)
    table[:, half:] = angles.sin_().mul_(scale)
    return table


def _frequencies(theta: float, rot_dim: int) -> Tensor:
    return theta ** -(torch.arange(0, rot_dim, 2, dtype=torch.float64) / rot_dim)


def _divided(rope: RopeConfig, divisors: tuple[float, ...]) -> Tensor:
    return _frequencies(rope.theta, rope.rot_dim) / torch.tensor(divisors, dtype=torch.float64)


def _dynamic(rope: RopeConfig, scaling: DynamicScaling, length: int) -> Tensor:
    dim = rope.rot_dim
    stretch = scaling.factor * max(1.0, length / scaling.original_max_position) - (scaling.factor - 1)
    return _frequencies(rope.theta * stretch ** (dim / (dim - 2)), dim)


def _yarn(rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    """A pair between those of `beta_fast` and `beta_slow` turns is divided the more the slower it turns."""
    dim, half = rope.rot_dim, rope.rot_dim // 2

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    divided = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = _frequencies(rope.theta, dim)
    return frequencies * (1.0 - divided + divided / scaling.factor)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths above original/low_freq_factor are stretched, below original/high_freq_factor kept."""
    turns = frequencies * scaling.original_max_position / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
