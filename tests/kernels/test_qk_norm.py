"""Queries and keys normalised: by themselves on a CPU, on the way to being rotated in the kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.attention import paged_attention_reference
from kernels.qk_norm import qk_norm, qk_norm_reference
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference

from .cases import TOLERANCES, assert_close, cos_sin, fused_qkv, paged_case, qk_norm_weights

Rope = Callable[..., Tensor]


def check_torch(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    norm = qk_norm_weights(q.shape[2], q.dtype)
    expected = qk_norm_reference(q, k, norm)
    found = qk_norm(q, k, norm)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "head_dim"),
    [(1, 32, 8, 128), (3, 7, 1, 64), (2, 5, 5, 80), (3, 1, 1, 96), (2, 9, 3, 256)],
)
def test_by_itself(tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = fused_qkv(tokens, q_heads, kv_heads, head_dim, dtype)
    before = v.clone()
    check_torch(q, k)
    assert torch.equal(v, before)


def test_column_major_projection() -> None:
    matrix = torch.randn(8 * 64, 3).t()
    q, k, _ = matrix.view(3, 8, 64).split((4, 2, 2), 1)
    check_torch(q, k)


def test_queries_and_keys_stay_side_by_side() -> None:
    """So that they are rotated in one go."""
    q, k = check_torch(*fused_qkv(4, 6, 2, 64, torch.float32)[:2])
    assert k.data_ptr() == q.data_ptr() + 6 * 64 * 4
    assert q.stride() == k.stride()


@pytest.fixture(params=["cpu", "triton"])
def rope(request: pytest.FixtureRequest) -> Rope:
    if request.param == "cpu":
        return rope_and_cache
    interpreted: SimpleNamespace = request.getfixturevalue("interpreted")
    return interpreted.rope_cache.rope_and_cache_triton


def check_rope(rope: Rope, qkv: tuple[Tensor, Tensor, Tensor], rot_dim: int) -> Tensor:
    """Against the reference; what isn't to be written is still NaN, and v is as it was."""
    q, k, v = qkv
    tokens, q_heads, dim = q.shape
    case = paged_case(
        [tokens + 9], [tokens], q_heads=q_heads, kv_heads=k.shape[1], head_dim=dim, page_size=16,
        dtype=q.dtype, written=False,
    )  # fmt: skip
    if tokens > 1:
        case.batch.slots[-1] = 3  # the null page
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    norm, table, values = qk_norm_weights(dim, q.dtype), cos_sin(tokens + 9, rot_dim), v.clone()
    expected = rope_and_cache_reference(q.clone(), k.clone(), v, table, case.batch, k_cache, v_cache, norm)
    rotated = rope(q, k, v, table, case.batch, case.k_cache, case.v_cache, norm)
    assert_close(rotated, expected)
    atol, rtol = TOLERANCES[q.dtype]
    torch.testing.assert_close(case.k_cache, k_cache, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_cache, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(v, values)
    return rotated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rot_dim"),
    [(16, 8, 128, 128), (7, 1, 64, 64), (5, 5, 80, 80), (4, 4, 80, 32), (3, 1, 96, 96), (9, 3, 256, 64)],
)
def test_rotated(
    rope: Rope, q_heads: int, kv_heads: int, head_dim: int, rot_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check_rope(rope, fused_qkv(3, q_heads, kv_heads, head_dim, dtype), rot_dim)


def test_rotated_from_separate_matrices(rope: Rope) -> None:
    check_rope(rope, (torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)), 64)


def test_rotated_from_a_column_major_projection(rope: Rope) -> None:
    q, k, v = torch.randn(8 * 64, 3).t().view(3, 8, 64).split((4, 2, 2), 1)
    check_rope(rope, (q, k, v), 64)


def test_zeros_stay_zeros(rope: Rope) -> None:
    q, k, v = torch.zeros(2, 4, 64), torch.zeros(2, 2, 64), torch.ones(2, 2, 64)
    assert not check_rope(rope, (q, k, v), 32).any()


@pytest.mark.parametrize(
    ("head_dim", "rot_dim", "dtype"),
    [(64, 64, torch.float32), (80, 32, torch.float16), (96, 96, torch.float32)],
)
@pytest.mark.parametrize("lengths", [[33, 1, 0, 40], [70, 0, 3, 1, 64, 32, 9, 65]], ids=["few", "many"])
def test_in_decode_attention(
    interpreted: SimpleNamespace, lengths: list[int], head_dim: int, rot_dim: int, dtype: torch.dtype
) -> None:
    count = len(lengths)
    case = paged_case(
        lengths, [1] * count, q_heads=6, kv_heads=2, head_dim=head_dim, page_size=16, dtype=dtype
    )
    q, k, v = fused_qkv(count, 6, 2, head_dim, dtype)
    norm, table = qk_norm_weights(head_dim, dtype), cos_sin(100, rot_dim)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache, norm)
    expected = paged_attention_reference(rotated, k_cache, v_cache, case.batch, head_dim**-0.5)
    out = interpreted.attention.rope_and_decode_triton(
        q, k, v, table, case.batch, case.k_cache, case.v_cache, head_dim**-0.5, 0, norm
    )
    assert_close(out, expected)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(case.k_cache, k_cache, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_cache, atol=0, rtol=0, equal_nan=True)
