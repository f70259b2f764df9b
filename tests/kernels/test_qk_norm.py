from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.qk_norm import qk_norm, qk_norm_reference

from .cases import assert_close, fused_qkv

EPS = 1e-6
QkNorm = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(params=["cpu", "triton"])
def norm(request: pytest.FixtureRequest) -> QkNorm:
    if request.param == "cpu":
        return qk_norm
    interpreted: SimpleNamespace = request.getfixturevalue("interpreted")
    return interpreted.qk_norm.qk_norm_triton


def check(norm: QkNorm, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    weights = [(1 + 0.3 * torch.randn(q.shape[2])).to(q.dtype) for _ in range(2)]
    expected = qk_norm_reference(q.clone(), k.clone(), *weights, EPS)
    found = norm(q, k, *weights, EPS)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "head_dim"),
    [(1, 32, 8, 128), (3, 7, 1, 64), (2, 5, 5, 80), (3, 1, 1, 96), (2, 9, 3, 256)],
)
def test_matches_reference(
    norm: QkNorm, tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k, _ = fused_qkv(tokens, q_heads, kv_heads, head_dim, dtype)
    check(norm, q, k)


def test_values_and_neighbours_stay_as_they_are(norm: QkNorm) -> None:
    q, k, v = fused_qkv(4, 6, 2, 64, torch.float32)
    before = v.clone()
    check(norm, q, k)
    assert torch.equal(v, before)


def test_column_major_projection(norm: QkNorm) -> None:
    matrix = torch.randn(8 * 64, 3).t()
    q, k, _ = matrix.view(3, 8, 64).split((4, 2, 2), 1)
    check(norm, q, k)


def test_queries_and_keys_stay_side_by_side_on_a_cpu() -> None:
    """So that they are rotated in one go."""
    q, k = check(qk_norm, *fused_qkv(4, 6, 2, 64, torch.float32)[:2])
    assert k.data_ptr() == q.data_ptr() + 6 * 64 * 4
    assert q.stride() == k.stride()


def test_no_tokens(norm: QkNorm) -> None:
    q, k = torch.empty(0, 8, 64).split((6, 2), 1)
    found = norm(q, k, torch.ones(64), torch.ones(64), EPS)
    assert [x.shape for x in found] == [(0, 6, 64), (0, 2, 64)]


def test_zeros_stay_zeros(norm: QkNorm) -> None:
    q, k = check(norm, torch.zeros(2, 4, 64), torch.zeros(2, 2, 64))
    assert not q.any()
    assert not k.any()
