from __future__ import annotations

import pytest
import torch

from kernels.linear import linear, linear_add, linear_reference
from kernels.packed_matrix import ROWS, PackedMatrix, pack

from .cases import assert_close

SHAPES = [(96, 32), (32, 96), (77, 36), (576, 64), (1, 5)]


def packed(weight: torch.Tensor) -> PackedMatrix:
    found = pack(weight)
    if found is None:
        pytest.fail("oneDNN's packing isn't what this module takes it for on this machine")
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 13, 16, 17, 33, 64, 130, 200, 317, ROWS[-1] + 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    matrix = packed(weight)
    assert_close(linear(x, matrix), linear_reference(x, weight))
    assert_close(linear(x, matrix, bias), linear_reference(x, weight, bias))
    assert_close(linear(x.t().contiguous().t(), matrix, bias), linear_reference(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_adds_in_place(rows: int) -> None:
    x, weight, residual = torch.randn(rows, 48), torch.randn(24, 48), torch.randn(rows, 24)
    expected = residual + linear_reference(x, weight)
    assert linear_add(x, packed(weight), None, residual) is residual
    assert_close(residual, expected)


def test_no_row_depends_on_the_others() -> None:
    """Rows that fill a convolution up, and whatever other requests bring, stay out of a result."""
    x, matrix = torch.randn(5, 64), packed(torch.randn(96, 64))
    expected = linear(x, matrix)[:2]
    x[2:] = torch.nan
    assert torch.equal(linear(x, matrix)[:2], expected)


def test_the_weight_can_go_once_it_is_packed() -> None:
    weight = torch.randn(96, 64)
    x, matrix = torch.randn(1, 64), packed(weight)
    expected = linear_reference(x, weight)
    weight.fill_(torch.nan)
    assert_close(linear(x, matrix), expected)
    assert matrix.nbytes == 4 * 96 * 64


def test_other_types_are_left_as_they_are() -> None:
    assert pack(torch.randn(8, 8).bfloat16()) is None
