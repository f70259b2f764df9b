from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.gemm_skinny import Norm, Tile, best_tile
from kernels.linear import (
    linear_add,
    linear_add_norm,
    linear_reference,
    linear_swiglu,
    normed_linear,
    normed_linear_swiglu,
)
from kernels.norm import rms_norm_reference
from kernels.swiglu import swiglu_reference

from .cases import assert_close

TILES = [
    Tile(16, 32),
    Tile(32, 16, splits=3),
    Tile(64, 32, transposed=True),
    Tile(32, 32, splits=2, tma=True),
    Tile(64, 32, transposed=True, tma=True),
]
ROW = Tile(16, 32, gemv=True)


def inputs(rows: int, columns: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner) / inner**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_product(interpreted: SimpleNamespace, tile: Tile, rows: int, dtype: torch.dtype) -> None:
    """N and K that no tile divides; twice, so that counters left wrong would show."""
    x, weight, bias = inputs(rows, 88, 72, dtype)
    for _ in range(2):
        y = interpreted.gemm_skinny.skinny_triton(x, weight, bias, tile)
        assert_close(y, linear_reference(x, weight, bias))


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.splits == 1], ids=str)
def test_swiglu_and_sum(interpreted: SimpleNamespace, tile: Tile) -> None:
    x, weight, bias = inputs(5, 88, 72, torch.float32)
    y = interpreted.gemm_skinny.skinny_triton(x, weight, None, tile, swiglu=True)
    assert_close(y, swiglu_reference(linear_reference(x, weight)))
    residual = torch.randn(5, 88)
    expected = residual + linear_reference(x, weight, bias)
    assert interpreted.gemm_skinny.skinny_triton(x, weight, bias, tile, add=True, out=residual) is residual
    assert_close(residual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_single_row_with_its_norm(interpreted: SimpleNamespace, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(1, 88, 70, dtype)
    scale = torch.rand(70).to(dtype)
    norm = interpreted.gemm_skinny.Norm(scale, 1e-5)
    normed = rms_norm_reference(x, scale, 1e-5)
    skinny = interpreted.gemm_skinny.skinny_triton
    assert_close(skinny(x, weight, bias, ROW, norm=norm), linear_reference(normed, weight, bias))
    y = skinny(x, weight, None, ROW, norm=norm, swiglu=True)
    assert_close(y, swiglu_reference(linear_reference(normed, weight)))
    residual = torch.randn(1, 88).to(dtype)
    expected = residual + linear_reference(x, weight, bias)
    assert_close(skinny(x, weight, bias, ROW, add=True, out=residual), expected)


def test_on_a_cpu_the_products_are_torch_s() -> None:
    x, weight, bias = inputs(3, 40, 24, torch.float32)
    scale = torch.rand(24)
    assert best_tile(x, weight) is None
    normed = rms_norm_reference(x, scale, 1e-5)
    norm = Norm(scale, 1e-5)
    assert_close(normed_linear(x, norm, weight, bias), linear_reference(normed, weight, bias))
    expected = swiglu_reference(linear_reference(normed, weight))
    assert_close(normed_linear_swiglu(x, norm, weight), expected)
    assert_close(linear_swiglu(normed, weight), expected)
    residual = torch.randn(3, 40)
    expected = residual + linear_reference(x, weight, bias)
    expected_twice = expected + linear_reference(x, weight, bias)
    assert linear_add(x, weight, bias, residual) is residual
    assert_close(residual, expected)
    assert linear_add_norm(x, weight, bias, residual, Norm(torch.rand(40), 1e-5)) is None
    assert_close(residual, expected_twice)
