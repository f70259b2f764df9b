from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.copy_pages import copy_pages, copy_pages_reference

POOLS = [(5, 2, 4, 8), (3, 5, 2, 4, 8), (2, 2, 5, 1, 3, 5)]


@pytest.fixture(params=["cpu", "triton"])
def copy(request: pytest.FixtureRequest):
    if request.param == "cpu":
        return copy_pages
    interpreted: SimpleNamespace = request.getfixturevalue("interpreted")
    return interpreted.copy_pages.copy_pages_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", POOLS)
def test_between_pools_of_different_size(copy, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    src = torch.randn(shape).to(dtype)
    dst = torch.full((*shape[:-4], 9, *shape[-3:]), float("nan"), dtype=dtype)
    pairs = torch.tensor([[4, 8], [0, 1], [4, 0], [2, 2]])
    expected = dst.clone()
    copy_pages_reference(src, expected, pairs)
    copy(src, dst, pairs)
    torch.testing.assert_close(dst, expected, rtol=0, atol=0, equal_nan=True)


def test_within_a_pool(copy) -> None:
    pool = torch.randn(2, 2, 6, 1, 4, 8)
    before = pool.clone()
    copy(pool, pool, torch.tensor([[1, 4], [1, 5], [3, 2]]))
    assert torch.equal(pool[:, :, [4, 5, 2]], before[:, :, [1, 1, 3]])
    assert torch.equal(pool[:, :, [0, 1, 3]], before[:, :, [0, 1, 3]])


def test_nothing_to_copy(copy) -> None:
    pool = torch.randn(6, 1, 4, 8)
    before = pool.clone()
    copy(pool, pool, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(pool, before)


def test_pools_that_differ_are_refused(copy) -> None:
    with pytest.raises(ValueError, match="pools differ"):
        copy(torch.empty(4, 1, 8, 4), torch.empty(4, 1, 16, 4), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"int64 \[n, 2\]"):
        copy(torch.empty(4, 1, 8, 4), torch.empty(4, 1, 8, 4), torch.tensor([1, 2]))
