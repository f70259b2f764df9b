"""A KV cache of FP8: what kernels write into it and read from it, interpreted and on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.attention import paged_attention, paged_attention_reference
from kernels.cache_types import FP8, FP8_MAX, as_cached_torch
from kernels.copy_pages import copy_pages, copy_pages_reference
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference

from .cases import Paged, assert_close, cos_sin, fused_qkv, paged_case, qk_norm_weights

SCALE = 0.125
MIXED = ([37, 5, 16, 1, 20, 12], [1, 1, 1, 1, 7, 12])  # decodes; a chunk behind a context; a whole prompt
HEADS = [(3, 1, 64, 16), (7, 1, 128, 8), (2, 2, 80, 16), (2, 2, 96, 32), (8, 1, 64, 128), (1, 1, 256, 16)]


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    if request.param == "cpu":
        return SimpleNamespace(attention=paged_attention, rope=rope_and_cache, copy=copy_pages)
    interpreted: SimpleNamespace = request.getfixturevalue("interpreted")
    return SimpleNamespace(
        attention=interpreted.attention.paged_attention_triton,
        rope=interpreted.rope_cache.rope_and_cache_triton,
        copy=interpreted.copy_pages.copy_pages_triton,
    )


def expected_of(case: Paged, window: int = 0) -> Tensor:
    return paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, SCALE, window)


def bits(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def assert_one_step(cache: Tensor, expected: Tensor) -> None:
    """Equal up to one step of FP8, which float32's last bit may decide; NaN where NaN is expected."""
    torch.testing.assert_close(cache.float(), expected.float(), atol=2**-9, rtol=2**-3, equal_nan=True)
    assert (bits(cache) != bits(expected)).float().mean() < 0.01


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size"), HEADS)
def test_attention(
    kernels: SimpleNamespace, q_heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    """As near to the reference as with a cache of the queries' own type: nothing is computed in FP8."""
    dtype = torch.float32 if head_dim == 80 else torch.float16
    case = paged_case(
        *MIXED, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype,
        cache_dtype=FP8,
    )  # fmt: skip
    out = kernels.attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    assert out.dtype == dtype
    assert_close(out, expected_of(case))


@pytest.mark.parametrize("window", [1, 16])
def test_attention_within_a_window(kernels: SimpleNamespace, window: int) -> None:
    case = paged_case(
        [70, 5, 50, 20], [1, 1, 6, 20], q_heads=2, kv_heads=1, head_dim=64, page_size=16, cache_dtype=FP8
    )
    out = kernels.attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE, window)
    assert_close(out, expected_of(case, window))


def test_attention_of_16_bits_in_float32(kernels: SimpleNamespace) -> None:
    case = paged_case(*MIXED, q_heads=4, kv_heads=2, head_dim=64, page_size=16, cache_dtype=torch.float16)
    assert_close(kernels.attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE), expected_of(case))


def test_several_layers_of_a_step_on_a_cpu() -> None:
    """Layers share what was planned for the first of them, not its pages."""
    shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "page_size": 8, "cache_dtype": FP8}
    case, other = (paged_case([40, 20, 9], [1, 1, 4], **shape) for _ in range(2))
    other.k_cache = as_cached_torch(other.k_cache.float() * 0.5, FP8)
    for k_cache, window in [(case.k_cache, 0), (other.k_cache, 0), (case.k_cache, 6), (case.k_cache, 0)]:
        layer = Paged(case.q, k_cache, case.v_cache, case.batch)
        out = paged_attention(case.q, k_cache, case.v_cache, case.batch, SCALE, window)
        assert_close(out, expected_of(layer, window))


@pytest.mark.parametrize(
    ("lengths", "normed"), [([33, 1, 0, 40], False), ([70, 0, 3, 65, 1, 130, 64, 32, 9], True)]
)
def test_rope_and_cache_on_the_way(interpreted: SimpleNamespace, lengths: list[int], normed: bool) -> None:
    """In decode attention as one after the other: a token's own key is seen as it is written."""
    count = len(lengths)
    case = paged_case(lengths, [1] * count, q_heads=6, kv_heads=2, head_dim=64, page_size=16, cache_dtype=FP8)
    q, k, v = fused_qkv(count, 6, 2, 64, torch.float32)
    v[-1] *= 1000  # beyond what FP8 holds
    norm = qk_norm_weights(64, torch.float32) if normed else None
    table = cos_sin(300, 64)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache, norm)
    out = interpreted.attention.rope_and_decode_triton(
        q, k, v, table, case.batch, case.k_cache, case.v_cache, SCALE, 0, norm
    )
    assert_one_step(case.k_cache, k_cache)
    assert torch.equal(bits(case.v_cache), bits(v_cache))
    # Keys as the kernel rounded them: one step of one of them is more than what is tolerated of a result.
    expected = paged_attention_reference(rotated, case.k_cache, v_cache, case.batch, SCALE)
    real = [i for i, length in enumerate(lengths) if length]
    assert_close(out[real], expected[real])


@pytest.mark.parametrize(
    ("head_dim", "rot_dim", "dtype"), [(128, 128, torch.float16), (80, 32, torch.float32)]
)
def test_rope_and_cache(kernels: SimpleNamespace, head_dim: int, rot_dim: int, dtype: torch.dtype) -> None:
    """Too large values become the largest there is, infinite ones too; NaN stays NaN; the rest of the cache
    isn't touched."""
    torch.manual_seed(0)
    shape = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "page_size": 16}
    case = paged_case([9, 20, 4], [1, 1, 4], **shape, dtype=dtype, cache_dtype=FP8, written=False)
    q, k, v = fused_qkv(6, 4, 2, head_dim, dtype)
    k[0] *= 1000
    v[0, 0, :5] = torch.tensor([500.0, -1e4, torch.inf, -torch.inf, torch.nan])
    v[1, 0, :4] = torch.tensor([448.0, 460.0, 464.0, -480.0])
    table = cos_sin(32, rot_dim)
    k_expected, v_expected = case.k_cache.clone(), case.v_cache.clone()
    expected = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_expected, v_expected)
    rotated = kernels.rope(q, k, v, table, case.batch, case.k_cache, case.v_cache)
    assert_close(rotated, expected)
    assert_one_step(case.k_cache, k_expected)
    assert torch.equal(bits(case.v_cache), bits(v_expected))
    slots = case.batch.slots
    written = case.k_cache[slots // 16, :, slots % 16]
    assert not written.isnan().any()
    assert written.float().abs().max() == FP8_MAX
    first = case.v_cache[slots[0] // 16, 0, slots[0] % 16].float()
    assert first[:4].tolist() == [448, -448, 448, -448]
    assert first[4].isnan()


def test_every_value_survives_the_cache() -> None:
    """All 254 of them, and NaN, by way of each type that is computed in."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        back = as_cached_torch(every.to(dtype), FP8).float()
        torch.testing.assert_close(back, every.float(), atol=0, rtol=0, equal_nan=True)


def test_rope_writes_what_decode_attention_writes(interpreted: SimpleNamespace) -> None:
    """A key computed again, as part of a prompt, is the same to the bit: both round twice."""
    case = paged_case([5], [1], q_heads=2, kv_heads=2, head_dim=64, page_size=16, dtype=torch.float16,
                      cache_dtype=FP8, written=False)  # fmt: skip
    q, k, v = fused_qkv(1, 2, 2, 64, torch.float16)
    table, caches = cos_sin(8, 64), [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(2)]
    interpreted.rope_cache.rope_and_cache_triton(q.clone(), k, v, table, case.batch, *caches[0])
    interpreted.attention.rope_and_decode_triton(q.clone(), k, v, table, case.batch, *caches[1], SCALE)
    assert torch.equal(bits(caches[0][0]), bits(caches[1][0]))
    assert torch.equal(bits(caches[0][1]), bits(caches[1][1]))


def test_gathered_for_long_prompts(interpreted: SimpleNamespace) -> None:
    case = paged_case(
        [37, 5, 20, 70], [1, 1, 7, 70], q_heads=2, kv_heads=1, head_dim=64, page_size=16,
        dtype=torch.float16, cache_dtype=FP8,
    )  # fmt: skip
    out = torch.full_like(case.q, float("nan"))
    module = interpreted.attention_dense
    tile = module.Tile(32, 64, 4, 2)
    module.dense_attention_triton(case.q, case.k_cache, case.v_cache, case.batch, SCALE, 0, out, tile)
    assert_close(out[2:], expected_of(case)[2:])


def test_copied_pages_are_the_same_bytes(kernels: SimpleNamespace) -> None:
    src = torch.randint(256, (3, 2, 9, 2, 16, 64), dtype=torch.uint8).view(FP8)
    dst = torch.zeros(3, 2, 6, 2, 16, 64, dtype=torch.uint8).view(FP8)
    expected = dst.clone()
    pairs = torch.tensor([[8, 1], [3, 5], [0, 2]])
    copy_pages_reference(src, expected, pairs)
    kernels.copy(src, dst, pairs)
    assert torch.equal(bits(dst), bits(expected))


def test_places_left_empty_read_nothing(kernels: SimpleNamespace) -> None:
    """Tables of padding rows name the null page, whatever it holds."""
    case = paged_case([9, 0, 0], [1, 1, 1], q_heads=2, kv_heads=1, head_dim=64, page_size=8, cache_dtype=FP8)
    out = kernels.attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    assert_close(out, expected_of(case))
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
