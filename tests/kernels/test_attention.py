from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import paged_attention, paged_attention_reference
from kernels.attention_cpu import GROUP_COST, GROUP_TOKENS, group_by_length
from kernels.attention_decode import num_splits
from kernels.batch import AttentionBatch
from kernels.rope_cache import rope_and_cache_reference

from .cases import Paged, assert_close, cos_sin, fused_qkv, paged_case

Attention = Callable[..., Tensor]
SCALE = 0.125
MIXED = ([37, 5, 16, 1, 20, 12], [1, 1, 1, 1, 7, 12])  # decodes; a chunk behind a context; a whole prompt


def check(attention: Attention, case: Paged, window: int = 0) -> None:
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, SCALE, window)
    out = attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE, window)
    assert out.is_contiguous()
    assert_close(out, expected)


@pytest.fixture(params=["cpu", "triton"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """Results that a kernel forgets to write are NaN: what torch.empty hands out is poisoned."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    if request.param == "triton":
        interpreted: SimpleNamespace = request.getfixturevalue("interpreted")
        monkeypatch.setattr(torch, "empty", poisoned)
        return interpreted.attention.paged_attention_triton
    monkeypatch.setattr(torch, "empty", poisoned)
    return paged_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_size"),
    [(3, 1, 64, 16), (7, 1, 128, 8), (2, 2, 80, 16), (2, 2, 96, 24), (8, 1, 64, 128), (1, 1, 256, 32)],
)
def test_matches_reference(
    attention: Attention, q_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    check(attention, paged_case(*MIXED, **shape, dtype=dtype))


def test_bfloat16_on_cpu() -> None:
    check(
        paged_attention,
        paged_case(*MIXED, q_heads=6, kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_sliding_window(attention: Attention, window: int) -> None:
    check(
        attention,
        paged_case([90, 5, 70, 40], [1, 1, 6, 40], q_heads=2, kv_heads=1, head_dim=64, page_size=16),
        window,
    )


def test_pages_behind_the_window_may_be_gone(attention: Attention) -> None:
    """The scheduler may free pages that no later query sees; their table entries point at the null page."""
    case = paged_case([90, 40], [1, 8], q_heads=2, kv_heads=1, head_dim=64, page_size=8)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, SCALE, 16)
    case.batch.block_tables[0, : (90 - 16) // 8] = 0
    case.batch.block_tables[1, : (40 - 8 - 16) // 8] = 0
    assert_close(attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE, 16), expected)


def test_padding_rows_give_zeros_and_touch_nothing_else(attention: Attention) -> None:
    shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "page_size": 8}
    case = paged_case([9, 30, 0, 0], [1, 1, 1, 1], **shape)
    check(attention, case)
    out = attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_batch_of_padding_only(attention: Attention) -> None:
    check(attention, paged_case([0, 0], [1, 1], q_heads=2, kv_heads=1, head_dim=64, page_size=8))


def test_only_prefills(attention: Attention) -> None:
    check(attention, paged_case([33, 9], [33, 3], q_heads=2, kv_heads=2, head_dim=64, page_size=16))


@pytest.mark.parametrize(
    ("longest", "splits", "window"), [(700, 2, 0), (1450, 5, 0), (700, 5, 1), (700, 2, 300), (700, 5, 500)]
)
def test_programs_that_share_a_chunk_s_keys(
    interpreted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, longest: int, splits: int, window: int
) -> None:
    """Of contexts of any length: with keys for all programs, for some, and for the first alone."""
    lengths, queries = [5, 1, longest, 300, 3, 40], [1, 1, 34, 9, 3, 2]
    case = paged_case(lengths, queries, q_heads=4, kv_heads=2, head_dim=16, page_size=16)
    prefill = interpreted.attention_prefill.prefill_attention_triton
    monkeypatch.setattr(
        interpreted.attention, "prefill_attention_triton", lambda *args: prefill(*args, splits=splits)
    )
    check(interpreted.attention.paged_attention_triton, case, window)


def test_query_is_a_view_of_a_fused_matrix(attention: Attention) -> None:
    case = paged_case(*MIXED, q_heads=2, kv_heads=1, head_dim=64, page_size=16)
    fused = torch.randn(len(case.q), 4, 64)
    fused[:, :2] = case.q
    case.q = fused[:, :2]
    check(attention, case)


def test_cache_is_one_layer_of_a_pool_strided_by_page(attention: Attention) -> None:
    case = paged_case(*MIXED, q_heads=2, kv_heads=2, head_dim=64, page_size=8)
    pool = torch.full((case.k_cache.shape[0], 3, 2, 2, 8, 64), float("nan"))
    pool[:, 1, 0], pool[:, 1, 1] = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = pool[:, 1, 0], pool[:, 1, 1]
    check(attention, case)


def test_scores_far_from_zero(attention: Attention) -> None:
    """The running maximum keeps exp2 in range."""
    case = paged_case([40, 20], [1, 5], q_heads=2, kv_heads=1, head_dim=64, page_size=8)
    case.q *= 300
    check(attention, case)


def test_page_offsets_are_64_bit(attention: Attention) -> None:
    """Pages behind element 2**31 of a pool whose memory is reserved but, elsewhere, never touched."""
    case = paged_case([20, 9], [1, 9], q_heads=4, kv_heads=4, head_dim=64, page_size=128, dtype=torch.float16)
    few, *page_shape = case.k_cache.shape
    num_pages = 2**31 // (4 * 128 * 64) + few + 1
    reserved = torch.UntypedStorage(2 * num_pages * 4 * 128 * 64)
    pool = torch.tensor([], dtype=torch.float16).set_(reserved).view(num_pages, *page_shape)
    first_high = num_pages - few
    assert first_high * pool.stride(0) > 2**31
    pool[first_high:] = case.k_cache
    case.v_cache = case.k_cache
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    case.batch.block_tables += first_high
    assert_close(attention(case.q, pool, pool, case.batch, SCALE), expected)


FEW, MANY = [70, 3, 0], [70, 0, 3, 65, 1, 290, 64, 0, 560]


@pytest.mark.parametrize(
    ("lengths", "splits", "window"),
    [
        *[(FEW, 1, 0), (FEW, 2, 33), (FEW, 5, 0), (FEW, 9, 33)],
        *[(MANY, 1, 33), (MANY, 2, 0), (MANY, 5, 33), (MANY, 9, 0)],
    ],
)
def test_number_of_splits_does_not_matter(
    interpreted: SimpleNamespace, lengths: list[int], splits: int, window: int
) -> None:
    """Joined by the second kernel (few) or by the last to arrive (many); also more splits than blocks: those
    find nothing to do."""
    case = paged_case(lengths, [1] * len(lengths), q_heads=3, kv_heads=1, head_dim=64, page_size=16)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, SCALE, window)
    for _ in range(2):  # the second time with the counters as the first left them
        out = torch.full_like(case.q, float("nan"))
        inputs = (case.q, case.k_cache, case.v_cache, case.batch, SCALE, window, out)
        interpreted.attention_decode.decode_attention_triton(*inputs, splits=splits, slots=2 * splits)
        assert_close(out, expected)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    slots=st.integers(1, 200),
    window=st.sampled_from([0, 1, 100, 700]),
)
def test_a_plan_covers_every_context_once_in_parts_of_a_fair_share(
    interpreted: SimpleNamespace, lengths: list[int], slots: int, window: int
) -> None:
    block = 64
    plan = interpreted.decode_plan.plan_decodes_triton(
        torch.tensor(lengths, dtype=torch.int32), slots, block, window
    ).tolist()
    items = [item for item in plan if item[0] >= 0]
    assert all(item[0] < 0 for item in plan[len(items) :])
    firsts = [max(n - window, 0) // block * block if window else 0 for n in lengths]
    total = sum(-(-n // block) - first // block for n, first in zip(lengths, firsts))
    share = max(1, -(-total // (2 * slots if len(lengths) > slots else slots)))
    sizes = [-(-(item[5] - item[4]) // block) for item in items]
    assert max(sizes) <= share + share // 4
    lasts = [size for item, size in zip(items, sizes) if item[3] == item[1] - 1]
    assert sizes == [share] * (len(items) - len(lengths)) + sorted(lasts, reverse=True)
    places = [item[2] + item[3] for item in items]
    assert sorted(places) == list(range(len(items)))  # every part has a place of its own
    for i, length in enumerate(lengths):
        own = sorted((item for item in items if item[0] == i), key=lambda item: item[3])
        assert [item[3] for item in own] == list(range(len(own)))
        assert all((item[1], item[6]) == (len(own), length) for item in own)
        assert [firsts[i], *(item[5] for item in own)] == [*(item[4] for item in own), length]


def test_splits_fill_the_device_once() -> None:
    assert num_splits(7, 128, 32768, 64, 528) == 1
    assert num_splits(1, 4, 32768, 64, 528) == 128
    assert num_splits(1, 4, 32768, 64, 264) == 66
    assert num_splits(7, 4, 32768, 64, 528) == 18
    assert num_splits(1, 4, 130, 64, 528) == 2
    assert num_splits(1, 4, 10, 64, 528) == 1


@pytest.mark.parametrize("rot_dim", [64, 16])
@pytest.mark.parametrize("lengths", [[33, 1, 0, 40], [70, 0, 3, 65, 1, 130, 64, 32, 9]], ids=["few", "many"])
def test_rope_and_cache_on_the_way(interpreted: SimpleNamespace, lengths: list[int], rot_dim: int) -> None:
    """The same as one after the other, wherever a sequence's part of the rotary table begins; nothing is
    written for padding: of length 0, or on the null page."""
    count = len(lengths)
    case = paged_case(lengths, [1] * count, q_heads=6, kv_heads=2, head_dim=64, page_size=16)
    case.batch.block_tables[1], case.batch.slots[1] = 0, 0
    case.batch.positions[3:] += 128
    q, k, v = fused_qkv(count, 6, 2, 64, torch.float32)
    table = cos_sin(300, rot_dim)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache)
    expected = paged_attention_reference(rotated, k_cache, v_cache, case.batch, SCALE)
    out = interpreted.attention.rope_and_decode_triton(
        q, k, v, table, case.batch, case.k_cache, case.v_cache, SCALE
    )
    real = [i for i in range(count) if i != 1]
    assert_close(out[real], expected[real])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(case.k_cache, k_cache, atol=2e-5, rtol=2e-5, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_cache, atol=0, rtol=0, equal_nan=True)


def test_places_for_chunks_are_no_decode_only_step() -> None:
    """A graph of few tokens has a place to decode for each of them, and others for chunks behind."""
    sizes = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "page_size": 8}
    assert paged_case([3, 9], [1, 1], **sizes).batch.decode_only
    assert not paged_case([3, 9], [1, 4], **sizes).batch.decode_only
    batch = paged_case([0, 0, 9], [1, 1, 2], **sizes).batch
    shared = dataclasses.replace(batch, positions=batch.positions[-2:], slots=batch.slots[-2:])
    assert shared.num_decodes == len(shared.positions)
    assert not shared.decode_only


@settings(max_examples=25, deadline=None)
@given(data=st.data(), group=st.sampled_from([1, 3, 7, 8]), head_dim=st.sampled_from([64, 80, 96]))
def test_cpu_matches_reference_on_any_batch(data: st.DataObject, group: int, head_dim: int) -> None:
    decodes = data.draw(st.lists(st.integers(0, 60), max_size=6))
    prefills = data.draw(
        st.lists(st.tuples(st.integers(0, 30), st.integers(2, 20)), min_size=not decodes, max_size=3)
    )
    lengths = decodes + [context + count for context, count in prefills]
    queries = [1] * len(decodes) + [count for _, count in prefills]
    page_size, window = data.draw(st.integers(8, 40)), data.draw(st.sampled_from([0, 1, 9, 25]))
    case = paged_case(lengths, queries, q_heads=group, kv_heads=1, head_dim=head_dim, page_size=page_size)
    check(paged_attention, case, window)


def _sub_batch(batch: AttentionBatch, i: int) -> AttentionBatch:
    return AttentionBatch(
        positions=batch.positions[i : i + 1],
        slots=batch.slots[i : i + 1],
        block_tables=batch.block_tables[i : i + 1],
        seq_lens=batch.seq_lens[i : i + 1],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        num_decodes=1,
        max_query_len=1,
        max_seq_len=int(batch.seq_lens[i]),
    )


def test_a_sequence_does_not_depend_on_its_neighbours(attention: Attention) -> None:
    lengths = [90, 3, 33, 64, 17]
    case = paged_case(lengths, [1] * 5, q_heads=3, kv_heads=1, head_dim=64, page_size=16)
    together = attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    for i in range(len(lengths)):
        alone = attention(case.q[i : i + 1], case.k_cache, case.v_cache, _sub_batch(case.batch, i), SCALE)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-6, rtol=1e-6)


def test_plans_serve_all_layers_but_not_other_layouts_or_windows() -> None:
    """One batch, several layers: the same plan; a cache of other strides or another window: another."""
    case = paged_case([40, 20, 9], [1, 1, 4], q_heads=2, kv_heads=1, head_dim=64, page_size=8)
    other = paged_case([40, 20, 9], [1, 1, 4], q_heads=2, kv_heads=1, head_dim=64, page_size=8, seed=0)
    other.k_cache.mul_(0.5)
    pool = torch.full((case.k_cache.shape[0], 2, 1, 8, 64), float("nan"))
    pool[:, 0], pool[:, 1] = case.k_cache, case.v_cache
    for k_cache, v_cache, window in [
        (case.k_cache, case.v_cache, 0),
        (other.k_cache, case.v_cache, 0),
        (case.k_cache, case.v_cache, 6),
        (pool[:, 0], pool[:, 1], 0),
        (case.k_cache, case.v_cache, 0),
    ]:
        check(paged_attention, Paged(case.q, k_cache, v_cache, case.batch), window)


@given(lengths=st.lists(st.integers(0, 6000), max_size=40))
def test_groups_hold_every_sequence_once_and_cost_no_more_than_one_or_each_alone(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == [i for i, n in enumerate(lengths) if n]

    def cost(groups: list[list[int]]) -> int:
        return sum(GROUP_COST + len(group) * max(lengths[i] for i in group) for group in groups)

    assert all(
        len(group) == 1 or len(group) * max(lengths[i] for i in group) <= GROUP_TOKENS for group in groups
    )
    alone = [[i] for i, n in enumerate(lengths) if n]
    assert cost(groups) <= cost(alone)
    together = [i for i, n in enumerate(lengths) if n]
    if together and len(together) * max(lengths) <= GROUP_TOKENS:
        assert cost(groups) <= cost([together])
