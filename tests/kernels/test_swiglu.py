from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.swiglu import swiglu, swiglu_reference

from .cases import assert_close

SHAPES = [(1, 64), (3, 1536), (5, 37), (2, 1)]


def _extreme(tokens: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(tokens, 2 * inner).to(dtype)
    x[0, 0] = -200.0  # exp(200) overflows float32; silu must still give 0
    x[-1, 0] = 30.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inner"), SHAPES)
def test_cpu_matches_reference(tokens: int, inner: int, dtype: torch.dtype) -> None:
    x = _extreme(tokens, inner, dtype)
    assert_close(swiglu(x), swiglu_reference(x))
    column_major = x.t().contiguous().t()
    y = swiglu(column_major)
    assert_close(y, swiglu_reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "inner"), SHAPES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's: x / inf is wanted
def test_triton_matches_reference(
    interpreted: SimpleNamespace, tokens: int, inner: int, dtype: torch.dtype
) -> None:
    x = _extreme(tokens, inner, dtype)
    assert_close(interpreted.swiglu.swiglu_triton(x), swiglu_reference(x))


def test_triton_takes_no_rows(interpreted: SimpleNamespace) -> None:
    assert interpreted.swiglu.swiglu_triton(torch.empty(0, 8)).shape == (0, 4)
