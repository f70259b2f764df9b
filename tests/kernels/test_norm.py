from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

from .cases import assert_close

EPS = 1e-5
SHAPES = [(1, 64), (3, 576), (5, 80), (2, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_cpu_matches_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(dtype),
    )
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    expected = add_rms_norm_reference(x, residual.clone(), weight, EPS)
    kept = residual
    normed, updated = add_rms_norm(x, residual, weight, EPS)
    assert updated is kept
    assert_close(normed, expected[0])
    assert_close(updated, expected[1])


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 5), hidden=st.integers(1, 300), scale=st.sampled_from([1e-4, 1.0, 1e3]))
def test_cpu_matches_reference_on_any_shape(tokens: int, hidden: int, scale: float) -> None:
    x = torch.randn(hidden, tokens).t() * scale  # column-major, as a GEMM may leave it
    weight = torch.randn(hidden)
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    residual = torch.randn(tokens, hidden)
    expected, _ = add_rms_norm_reference(x, residual.clone(), weight, EPS)
    assert_close(add_rms_norm(x, residual, weight, EPS)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_matches_reference(
    interpreted: SimpleNamespace, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    tokens, hidden = shape
    wide = torch.randn(tokens, 2 * hidden).to(dtype)
    x, residual = wide.split(hidden, dim=1)  # rows with a gap between them
    weight = torch.randn(hidden).to(dtype)
    assert_close(interpreted.norm.rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    expected = add_rms_norm_reference(x, residual.clone(), weight, EPS)
    normed, updated = interpreted.norm.add_rms_norm_triton(x, residual, weight, EPS)
    assert_close(normed, expected[0])
    assert torch.equal(updated, expected[1])
    assert updated is residual


def test_triton_takes_no_rows(interpreted: SimpleNamespace) -> None:
    assert interpreted.norm.rms_norm_triton(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)


def test_residual_that_cannot_be_updated_in_place_is_refused(interpreted: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="in place"):
        interpreted.norm.add_rms_norm_triton(torch.ones(4, 8), torch.ones(8, 4).t(), torch.ones(8), EPS)


@pytest.mark.parametrize("device", ["cpu", "triton"])
def test_parts_are_added_before_they_are_rounded(interpreted: SimpleNamespace, device: str) -> None:
    torch.manual_seed(2)
    parts, residual, weight = torch.randn(3, 5, 80), torch.randn(5, 80).half(), torch.randn(80).half()
    expected = add_rms_norm_reference(parts, residual.clone(), weight, EPS)
    add = add_rms_norm if device == "cpu" else interpreted.norm.add_rms_norm_triton
    normed, updated = add(parts, residual, weight, EPS)
    assert normed.dtype == torch.float16
    assert_close(normed, expected[0])
    assert_close(updated, expected[1])
