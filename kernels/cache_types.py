"""What the KV cache holds where its elements aren't of the type that is computed in: FP8, or 16 bits less.

A value is rounded to the type it was computed in, then to the cache's. FP8 is e4m3 without infinities, with
a scale of 1: magnitudes up to 448, above which conversions differ (NaN, or the largest); here such a value
becomes the largest, and NaN stays NaN. Reading is exact, since every e4m3 value is one of bfloat16 and
float16 as well: kernels convert what they have loaded to the queries' type before any product, or to float16.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@triton.jit
def as_cached(x, dtype: tl.constexpr):
    """Values as elements of a cache of `dtype`."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def as_float16(x):
    """Queries for products with FP8, which is converted to float16 in half an instruction an element."""
    return tl.clamp(x.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def words_as_float16(words, ASM: tl.constexpr):
    """int16 words of two FP8 values each as two float16 tensors: the low bytes, the high bytes. ASM: by four
    instructions for four values, which only a card has."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 bytes; .reg .b16 pair, none;
            prmt.b32 bytes, $2, 0, 0x0020; mov.b32 {pair, none}, bytes; cvt.rn.f16x2.e4m3x2 $0, pair;
            prmt.b32 bytes, $2, 0, 0x0031; mov.b32 {pair, none}, bytes; cvt.rn.f16x2.e4m3x2 $1, pair; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


def as_cached_torch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`as_cached` in plain torch."""
    return (x.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else x).to(dtype)
