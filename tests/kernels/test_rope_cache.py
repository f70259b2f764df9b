from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference

from .cases import TOLERANCES, Paged, assert_close, cos_sin, fused_qkv, paged_case

Rope = Callable[..., Tensor]
MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.12 on


def check(
    rope: Rope,
    qkv: tuple[Tensor, Tensor, Tensor],
    lengths: list[int],
    queries: list[int],
    *,
    rot_dim: int,
    page_size: int,
) -> None:
    """Rotated q and both caches equal the reference's; what shouldn't be written is still NaN."""
    q, k, v = qkv
    case = paged_case(
        lengths,
        queries,
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        page_size=page_size,
        dtype=q.dtype,
        written=False,
    )
    table = cos_sin(max(*lengths, 2), rot_dim)
    k_expected, v_expected = case.k_cache.clone(), case.v_cache.clone()
    expected = rope_and_cache_reference(
        q.clone(), k.clone(), v.clone(), table, case.batch, k_expected, v_expected
    )
    rotated = rope(q, k, v, table, case.batch, case.k_cache, case.v_cache)
    assert rotated.shape == expected.shape
    assert_close(rotated, expected)
    atol, rtol = TOLERANCES[q.dtype]
    torch.testing.assert_close(case.k_cache, k_expected, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_expected, atol=0, rtol=0, equal_nan=True)


@pytest.fixture(params=["cpu", "triton"])
def rope(request: pytest.FixtureRequest) -> Rope:
    if request.param == "cpu":
        return rope_and_cache
    interpreted: SimpleNamespace = request.getfixturevalue("interpreted")
    return interpreted.rope_cache.rope_and_cache_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rot_dim", "page_size"),
    [(9, 3, 64, 64, 16), (7, 1, 128, 128, 8), (4, 4, 80, 32, 16), (3, 3, 96, 96, 24), (8, 1, 64, 16, 32)],
)
def test_matches_reference(
    rope: Rope, q_heads: int, kv_heads: int, head_dim: int, rot_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = fused_qkv(6, q_heads, kv_heads, head_dim, dtype)
    check(rope, qkv, [9, 20, 4], [1, 1, 4], rot_dim=rot_dim, page_size=page_size)


def test_bfloat16_on_cpu() -> None:
    check(rope_and_cache, fused_qkv(3, 9, 3, 64, torch.bfloat16), [9, 20], [1, 2], rot_dim=64, page_size=16)


def test_separate_matrices(rope: Rope) -> None:
    q, k, v = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    check(rope, (q, k, v), [5, 9], [1, 1], rot_dim=64, page_size=8)


def test_column_major_projection(rope: Rope) -> None:
    """What kernels.linear hands over on a CPU for a few rows."""
    matrix = torch.randn(8 * 64, 3).t()
    q, k, v = matrix.view(3, 8, 64).split((4, 2, 2), 1)
    check(rope, (q, k, v), [5, 9, 1], [1, 1, 1], rot_dim=64, page_size=8)


def test_neighbours_in_memory_but_not_in_one_matrix(rope: Rope) -> None:
    """k lies right behind q's last row: adjacent addresses, yet no fused matrix."""
    flat = torch.randn(2 * 4 * 64 + 2 * 2 * 64 * 2)
    q = flat[: 2 * 4 * 64].view(2, 4, 64)
    k, v = flat[2 * 4 * 64 :].view(2, 2, 2, 64).unbind(0)
    check(rope, (q, k, v), [5, 9], [1, 1], rot_dim=64, page_size=8)


def test_padding_rows_write_nothing(rope: Rope) -> None:
    """Three real sequences in a batch of five."""
    check(rope, fused_qkv(5, 4, 2, 64, torch.float32), [9, 1, 20, 0, 0], [1] * 5, rot_dim=64, page_size=8)


def test_batch_of_padding_only(rope: Rope) -> None:
    check(rope, fused_qkv(2, 4, 2, 64, torch.float32), [0, 0], [1, 1], rot_dim=64, page_size=8)


def test_layer_of_a_pool_strided_by_page(rope: Rope) -> None:
    """Pages of all layers interleaved: a layer's cache is a strided view, its neighbours stay untouched."""
    qkv = fused_qkv(2, 4, 2, 64, torch.float32)
    case = paged_case([9, 20], [1, 1], q_heads=4, kv_heads=2, head_dim=64, page_size=8, written=False)
    pages = case.k_cache.shape[0]
    pool = torch.full((pages, 3, 2, 2, 8, 64), float("nan"))
    table = cos_sin(32, 64)
    expected = rope_and_cache_reference(*qkv, table, case.batch, case.k_cache, case.v_cache)
    rotated = rope(*qkv, table, case.batch, pool[:, 1, 0], pool[:, 1, 1])
    assert_close(rotated, expected)
    torch.testing.assert_close(pool[:, 1, 0], case.k_cache, atol=2e-5, rtol=2e-5, equal_nan=True)
    torch.testing.assert_close(pool[:, 1, 1], case.v_cache, atol=0, rtol=0, equal_nan=True)
    assert pool[:, [0, 2]].isnan().all()


def test_page_offsets_are_64_bit(rope: Rope) -> None:
    """Pages behind element 2**31 of a pool whose memory is reserved but, elsewhere, never touched."""
    qkv = fused_qkv(3, 4, 4, 64, torch.float32)
    case, table = high_case(), cos_sin(256, 64)
    batch, k_cache, v_cache, written = in_a_large_pool(case)
    rope_and_cache_reference(*(x.clone() for x in qkv), table, case.batch, case.k_cache, case.v_cache)
    rope(*qkv, table, batch, k_cache, v_cache)
    torch.testing.assert_close(written[:, 0], case.k_cache, atol=2e-5, rtol=2e-5, equal_nan=True)
    torch.testing.assert_close(written[:, 1], case.v_cache, atol=0, rtol=0, equal_nan=True)


def test_page_offsets_are_64_bit_on_the_way_of_a_decode(interpreted: SimpleNamespace) -> None:
    qkv = fused_qkv(3, 4, 4, 64, torch.float32)
    case, table = high_case(), cos_sin(256, 64)
    batch, k_cache, v_cache, written = in_a_large_pool(case)
    rope_and_cache_reference(*(x.clone() for x in qkv), table, case.batch, case.k_cache, case.v_cache)
    interpreted.attention.rope_and_decode_triton(*qkv, table, batch, k_cache, v_cache, 0.125)
    torch.testing.assert_close(written[:, 0], case.k_cache, atol=2e-5, rtol=2e-5, equal_nan=True)
    torch.testing.assert_close(written[:, 1], case.v_cache, atol=0, rtol=0, equal_nan=True)


def high_case() -> Paged:
    return paged_case([9, 200, 1], [1, 1, 1], q_heads=4, kv_heads=4, head_dim=64, page_size=128)


def in_a_large_pool(case: Paged) -> tuple[AttentionBatch, Tensor, Tensor, Tensor]:
    """The step with its pages at the end of a large pool: its batch, keys and values there, and those pages
    [pages, 2, ..]."""
    few, *page = case.k_cache.shape
    page_size, first = page[1], 2**31 // (2 * case.k_cache[0].numel()) + 1
    elements = 2 * (first + few) * case.k_cache[0].numel()
    # With as much in front of it: what wraps around fails the test and not the process.
    size = 4 * (2**31 + elements)
    reserved = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    pool = torch.frombuffer(reserved, dtype=torch.float32)[2**31 :].view(first + few, 2, *page)
    assert first * pool.stride(0) > 2**31
    pool[first:] = torch.stack((case.k_cache, case.v_cache), 1)
    tables, slots = case.batch.block_tables + first, case.batch.slots + first * page_size
    batch = dataclasses.replace(case.batch, block_tables=tables, slots=slots, plans={})
    return batch, pool[:, 0], pool[:, 1], pool[first:]


def test_angles_stay_exact_at_position_30000(rope: Rope) -> None:
    q, k, v = fused_qkv(1, 2, 1, 64, torch.float32)
    case = paged_case([1], [1], q_heads=2, kv_heads=1, head_dim=64, page_size=8)
    case.batch.positions = torch.tensor([30_000])
    pair = torch.complex(q[..., :32].double(), q[..., 32:].double())
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    turned = pair * torch.polar(torch.ones_like(frequencies), 30_000 * frequencies)
    rotated = rope(q, k, v, cos_sin(30_001, 64), case.batch, case.k_cache, case.v_cache)
    assert_close(rotated, torch.cat((turned.real, turned.imag), -1).float())


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 7, 8]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 80, 96, 256]),
    rotated=st.sampled_from([1, 2]),
    page_size=st.integers(8, 40),
)
def test_cpu_matches_reference_on_any_shape(
    lengths: list[int], group: int, kv_heads: int, head_dim: int, rotated: int, page_size: int
) -> None:
    qkv = fused_qkv(len(lengths), kv_heads * group, kv_heads, head_dim, torch.float32)
    check(rope_and_cache, qkv, lengths, [1] * len(lengths), rot_dim=head_dim // rotated, page_size=page_size)
