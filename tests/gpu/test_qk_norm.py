"""Normalised queries and keys, and sequences by different parts of the rotary table, as compiled."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import paged_attention_reference, rope_and_attention
from kernels.qk_norm import qk_norm, qk_norm_reference
from kernels.rope_cache import rope_and_cache_reference
from tests.kernels.cases import assert_close, cos_sin, fused_qkv, paged_case

pytestmark = pytest.mark.gpu
SCALE = 0.125


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (7, 1, 80)])
@pytest.mark.parametrize("tokens", [1, 37, 700])
def test_matches_reference(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k, v = fused_qkv(tokens, q_heads, kv_heads, head_dim, dtype, "cuda")
    weights = [(1 + 0.3 * torch.randn(head_dim, device="cuda")).to(dtype) for _ in range(2)]
    expected = qk_norm_reference(q.clone(), k.clone(), *weights, 1e-6)
    values = v.clone()
    for found, right in zip(qk_norm(q, k, *weights, 1e-6), expected, strict=True):
        assert_close(found, right)
    assert torch.equal(v, values)


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
