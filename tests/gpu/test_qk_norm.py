"""Queries and keys normalised before they are rotated, and sequences by different parts of the rotary table,
as compiled."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import paged_attention_reference, rope_and_attention
from kernels.qk_norm import QkNorm
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference
from tests.kernels.cases import TOLERANCES, assert_close, cos_sin, fused_qkv, paged_case, qk_norm_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # the first run compiles every variant
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS = [(32, 8, 128, 128), (7, 1, 64, 64), (5, 5, 80, 80), (4, 2, 80, 32), (6, 2, 96, 96), (8, 1, 256, 128)]
SCALE = 0.125


def check_rope(
    tokens: int,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    norm: QkNorm | None,
    cache_dtype: torch.dtype,
) -> None:
    q_heads, kv_heads, head_dim, rot_dim = heads
    q, k, v = fused_qkv(tokens, q_heads, kv_heads, head_dim, dtype, "cuda")
    case = paged_case(
        [tokens + 9], [tokens], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, page_size=16,
        dtype=dtype, device="cuda", written=False,
    )  # fmt: skip
    if tokens > 1:
        case.batch.slots[-1] = 3  # the null page
    table = cos_sin(tokens + 9, rot_dim, "cuda")
    caches = [cache.to(cache_dtype) for cache in (case.k_cache, case.v_cache)]
    right = [cache.clone() for cache in caches]
    expected = rope_and_cache_reference(q.clone(), k.clone(), v, table, case.batch, *right, norm)
    values = v.clone()
    assert_close(rope_and_cache(q, k, v, table, case.batch, *caches, norm), expected)
    atol, rtol = TOLERANCES[cache_dtype]
    for cache, expected_cache in zip(caches, right, strict=True):
        torch.testing.assert_close(
            cache.float(), expected_cache.float(), atol=atol, rtol=rtol, equal_nan=True
        )
    assert torch.equal(v, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 37, 700])
def test_rotated(tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_rope(tokens, heads, dtype, qk_norm_weights(heads[2], dtype, "cuda"), dtype)


@pytest.mark.parametrize("normed", [True, False])
def test_into_a_cache_of_8_bits(normed: bool) -> None:
    norm = qk_norm_weights(128, torch.bfloat16, "cuda") if normed else None
    check_rope(37, (32, 8, 128, 128), torch.bfloat16, norm, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("count", [3, 40])
def test_in_decode_attention(count: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    q_heads, kv_heads, head_dim, rot_dim = heads
    lengths = [0 if i == 1 else 17 + 13 * i for i in range(count)]
    case = paged_case(
        lengths, [1] * count, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, page_size=16,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    q, k, v = fused_qkv(count, q_heads, kv_heads, head_dim, dtype, "cuda")
    norm, table = qk_norm_weights(head_dim, dtype, "cuda"), cos_sin(600, rot_dim, "cuda")
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache, norm)
    expected = paged_attention_reference(rotated, k_cache, v_cache, case.batch, SCALE)
    out = rope_and_attention(q, k, v, table, case.batch, case.k_cache, case.v_cache, SCALE, 0, norm)
    assert_close(out, expected)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(case.k_cache, k_cache, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_cache, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("rot_dim", [128, 96])
def test_decodes_by_their_own_part_of_the_rotary_table(count: int, rot_dim: int) -> None:
    lengths = [17 + 13 * i for i in range(count)]
    case = paged_case(
        lengths, [1] * count, q_heads=8, kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    case.batch.positions[::2] += 600
    q, k, v = fused_qkv(count, 8, 2, 128, torch.bfloat16, "cuda")
    table = cos_sin(1200, rot_dim, "cuda")
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache)
    expected = paged_attention_reference(rotated, k_cache, v_cache, case.batch, SCALE)
    out = rope_and_attention(q, k, v, table, case.batch, case.k_cache, case.v_cache, SCALE)
    assert_close(out, expected)
