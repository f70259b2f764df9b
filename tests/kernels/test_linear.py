from __future__ import annotations

import pytest
import torch

from kernels.linear import MM_ROWS, WIDE, linear, linear_reference

from .cases import assert_close


@pytest.mark.parametrize("rows", [1, 2, 7, MM_ROWS, MM_ROWS + 1])
@pytest.mark.parametrize(("columns", "inner"), [(96, 32), (32, 96), (64, 64), (1, 5), (WIDE, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_formulation_matches_reference(rows: int, columns: int, inner: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    bias = torch.randn(columns) if with_bias else None
    expected = linear_reference(x, weight, bias)
    assert_close(linear(x, weight, bias), expected)
    assert_close(linear(x.t().contiguous().t(), weight, bias), expected)  # column-major input
    assert_close(linear(torch.cat((x, x), 1)[:, :inner], weight, bias), expected)  # rows with a gap


@pytest.mark.parametrize("rows", [1, 3])
def test_a_single_row_can_be_viewed_as_heads(rows: int) -> None:
    y = linear(torch.randn(rows, 8), torch.randn(24, 8))
    assert y.view(rows, 3, 8).shape == (rows, 3, 8)


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_bfloat16(rows: int) -> None:
    x, weight = torch.randn(rows, 64).bfloat16() / 8, torch.randn(32, 64).bfloat16()
    assert_close(linear(x, weight), linear_reference(x, weight))


def test_inputs_are_left_alone() -> None:
    x, weight, bias = torch.randn(1, 8), torch.randn(8, 8), torch.randn(8)
    before = x.clone(), weight.clone(), bias.clone()
    linear(x, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip((x, weight, bias), before))
