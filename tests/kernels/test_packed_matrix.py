from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import packed_matrix
from kernels.linear import linear, linear_add, linear_reference, linear_swiglu
from kernels.packed_matrix import PackedMatrix, pack
from kernels.swiglu import swiglu_reference

from .cases import assert_close

SHAPES = [(96, 32), (32, 96), (77, 36), (576, 64), (1, 5), (17, 1)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 33, 64, 130]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def packed(weight: torch.Tensor, gated: bool = False) -> PackedMatrix:
    found = pack(weight, gated)
    if found is None:
        pytest.fail("no kernel was compiled for this machine")
    return found


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    matrix = packed(weight)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected = linear_reference(x, weight)
        assert_close(linear(x, matrix), expected)
        assert_close(linear(x, matrix, bias), linear_reference(x, weight, bias))
        for strided in (x.t().contiguous().t(), torch.cat((x, x), 1)[:, : shape[1]]):
            assert_close(linear(strided, matrix), expected)


def test_more_rows_than_stay_in_the_cache_at_once() -> None:
    x, weight = torch.randn(300, 1000), torch.randn(40, 1000) / 32
    assert_close(linear(x, packed(weight)), linear_reference(x, weight))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adds_in_place(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    matrix = packed(weight)
    for rows in ROWS:
        x, residual = torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
        expected = residual + linear_reference(x, weight, bias)
        assert linear_add(x, matrix, bias, residual) is residual
        assert_close(residual, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("inner", [1, 8, 36, 64])
def test_gated_ones_do_swiglu(inner: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2 * inner, 48) / 4
    matrix = packed(weight, gated=True)
    for rows in ROWS:
        x = torch.randn(rows, 48)
        assert_close(linear_swiglu(x, matrix), swiglu_reference(linear_reference(x, weight)))


def test_gates_far_from_zero_and_nan() -> None:
    x = torch.tensor([[-200.0], [-90.0], [-88.0], [0.0], [90.0], [200.0], [torch.nan], [torch.inf]])
    gated = linear_swiglu(x, packed(torch.ones(16, 1), gated=True))
    expected = torch.nn.functional.silu(x) * x
    torch.testing.assert_close(gated, expected.expand(8, 8), atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_in_any_batch(gated: bool) -> None:
    """Bit for bit: what a request gets can't depend on what others run beside it."""
    torch.manual_seed(0)
    x, matrix = torch.randn(130, 200), packed(torch.randn(150, 200), gated)
    product = linear_swiglu if gated else linear
    alone = torch.cat([product(row[None], matrix) for row in x])
    for rows in ROWS:
        assert torch.equal(product(x[:rows], matrix), alone[:rows])
        assert torch.equal(product(x[-rows:], matrix), alone[-rows:])


def test_what_other_rows_hold_stays_out() -> None:
    x, matrix = torch.randn(5, 64), packed(torch.randn(96, 64))
    expected = linear(x, matrix)[:2]
    x[2:] = torch.nan
    assert torch.equal(linear(x, matrix)[:2], expected)


def test_nothing_is_written_beside_the_result() -> None:
    x, matrix = torch.randn(7, 36), packed(torch.randn(77, 36))
    place = torch.full((9, 100), 5.0)
    matrix.add_product(x, place[1:8, 10:87])
    assert_close(place[1:8, 10:87], 5 + linear(x, matrix))
    place[1:8, 10:87] = 5.0
    assert torch.equal(place, torch.full((9, 100), 5.0))


def test_what_the_kernel_would_misread_is_refused() -> None:
    """It sees addresses only: another type or size would be read, or written, beyond its end."""
    matrix = packed(torch.randn(96, 64))
    for x in (torch.randn(2, 63), torch.randn(2, 65), torch.randn(2, 64).double()):
        with pytest.raises(ValueError, match=r"x must be float32 \[T, 64\]"):
            matrix.product(x)
    x = torch.randn(2, 64)
    for y in (torch.zeros(2, 95), torch.zeros(3, 96), torch.zeros(96, 2).t(), torch.zeros(2, 96).double()):
        with pytest.raises(ValueError, match=r"y must be float32 \[2, 96\]"):
            matrix.add_product(x, y)


def test_the_weight_can_go_once_it_is_packed() -> None:
    weight = torch.randn(96, 64)
    x, matrix = torch.randn(1, 64), packed(weight)
    expected = linear_reference(x, weight)
    weight.fill_(torch.nan)
    assert_close(linear(x, matrix), expected)
    assert matrix.nbytes == 4 * 96 * 64


def test_other_types_are_left_as_they_are() -> None:
    assert pack(torch.randn(8, 8).bfloat16()) is None


def test_without_kernels_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrix, "compiled", lambda: None)
    assert pack(torch.randn(8, 8)) is None
