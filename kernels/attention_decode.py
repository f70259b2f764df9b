"""Decode attention over the paged KV cache: one query token a sequence, split over the context.

    out[b, h] = softmax(scale · q[b, h] · K_bᵀ) · V_b        K_b, V_b: keys and values sequence b may see

Flash-decoding: every (sequence, KV head, split) program walks its share of the context with a running maximum
and sum (Milakov & Gimelshein 2018, arXiv:1805.02867), all query heads of the KV head at once as the rows of
one `tl.dot`. The splits of a sequence are joined by their log-sum-exp: by the last of them to arrive or,
where few sequences have many splits each, by a second kernel. Which tokens a split owns is derived on the
device from seq_lens, so one captured graph serves every length: with many sequences by decode_plan.py, with
few in the kernel itself, a number of splits that is part of the grid.

With `rope`, the step's own token comes along: its query is (normalised and) rotated on the way in, and the
split that owns its place writes its key and value into the cache.

A score is kept in log2 units (scale · log2 e is folded in), so that exponentials are exp2.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import pdl
from kernels.batch import AttentionBatch
from kernels.cache_types import FP8, as_cached, as_float16, words_as_float16
from kernels.decode_join import MAX_SPLITS, join, join_splits_triton, split_blocks
from kernels.decode_plan import FIELDS, plan_decodes_triton
from kernels.pdl import load_at_once
from kernels.qk_norm import QkNorm
from kernels.rope_cache import angles, rotated

LOG2_E = math.log2(math.e)
FEW_SEQS = 8  # up to so many share the device evenly
PROGRAMS_PER_SM = 4  # what 128 registers a thread leave room for: one full wave
FEW_PROGRAMS_PER_SM = 3
ONE_PROGRAMS_PER_SM = 2  # for a single sequence: its tile's shared memory


@triton.jit
def _begin(
    p_q, p_new_k, p_new_v, p_cos_sin, p_position, p_q_weight, p_k_weight, eps, p_key, p_value, scale_log2,
    stride_qh, stride_cs, mine, kept,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program's queries, and maximum, sum and values of what comes before the tokens in the cache: nothing,
    or with ROPE the step's own token where it is `mine`, which is written to p_key and p_value if `kept`."""
    if EARLY:
        gdc_wait()
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_md = (o_m < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_query = p_q + o_m[:, None] * stride_qh
    if ROPE:
        m_mine = o_d < tl.where(mine, HEAD_DIM, 0)
        b_cos, b_sin = angles(p_cos_sin + tl.load(p_position) * stride_cs, o_d, HALF)
        b_q = rotated(
            p_query, p_q_weight, m_md, o_d[None, :], b_cos[None, :], b_sin[None, :], eps,
            HEAD_DIM, HALF, NORM, True,
        )  # fmt: skip
        b_key = rotated(p_new_k, p_k_weight, m_mine, o_d, b_cos, b_sin, eps, HEAD_DIM, HALF, NORM, False)
        b_key = as_cached(b_key, p_key.dtype.element_ty)
        b_value = as_cached(tl.load(p_new_v + o_d, mask=m_mine, other=0.0), p_value.dtype.element_ty)
        m_write = o_d < tl.where(mine & kept, HEAD_DIM, 0)
        tl.store(p_key + o_d, b_key, mask=m_write)
        tl.store(p_value + o_d, b_value, mask=m_write)
        # The new key is the first one seen, so that nobody has to wait for it to be in memory.
        b_own = tl.sum(b_q.to(tl.float32) * b_key.to(tl.float32)[None, :], axis=1) * scale_log2
        b_max = tl.where(mine, b_own, float("-inf"))
        b_sum = tl.zeros([BLOCK_M], tl.float32) + mine.to(tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + b_value.to(tl.float32)[None, :]
    else:
        b_q = tl.load(p_query + o_d[None, :], mask=m_md, other=0.0)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    return b_q, b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["stride_table", "splits"])
def _decode_kernel(
    p_q, p_new_k, p_new_v, p_cos_sin, p_q_weight, p_k_weight, eps, p_k, p_v, p_out, p_part, p_lse, p_arrived,
    p_items, p_block_tables, p_seq_lens, p_positions, scale_log2,
    stride_qt, stride_qh, stride_nkt, stride_nkh, stride_nvt, stride_nvh, stride_cs,
    stride_n, stride_h, stride_p, stride_ot, stride_oh, stride_table, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, PARTIAL: tl.constexpr,
    PLANNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, DIRECT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = (
        p_v.dtype.element_ty == tl.float8e4nv and p_q.dtype.element_ty.primitive_bitwidth == 16
    )
    i_h = tl.program_id(0)
    first = 0
    if PLANNED:
        p_item = p_items + tl.program_id(1) * FIELDS
        i_b = tl.load(p_item).to(tl.int64)
        parts = tl.load(p_item + 1)
        i_first = tl.load(p_item + 2).to(tl.int64)
        i_part = i_first + tl.load(p_item + 3)
        lo = tl.load(p_item + 4)
        hi = tl.load(p_item + 5)
        seq_len = tl.load(p_item + 6)
        if WINDOW > 0:
            first = tl.maximum(seq_len - WINDOW, 0)
    else:
        i_b = tl.program_id(1).to(tl.int64)
        i_first = i_b * splits
        i_part = i_first + tl.program_id(2)
        parts = splits
        seq_len = tl.load(p_seq_lens + i_b)
        if WINDOW > 0:
            first = tl.maximum(seq_len - WINDOW, 0)
        first_block, _, blocks_per_split = split_blocks(seq_len, splits, WINDOW, BLOCK_N)
        lo = (first_block + tl.program_id(2) * blocks_per_split) * BLOCK_N
        hi = tl.minimum(lo + blocks_per_split * BLOCK_N, seq_len)
    if PLANNED and i_b < 0:
        return
    p_table = p_block_tables + i_b * stride_table
    p_k_head = p_k + i_h.to(tl.int64) * stride_h
    p_v_head = p_v + i_h.to(tl.int64) * stride_h
    # Lengths and tables are older than the step's first kernel, and so are all keys but the step's own: with
    # ROPE, which computes those here, loading begins before the kernels in front have ended.
    EARLY: tl.constexpr = PDL and ROPE
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    if PARTIAL and not PLANNED and lo >= hi:
        if EARLY:
            gdc_wait()
        return  # who joins the splits knows how many a context has

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    m_m = o_m < GROUP
    m_md = m_m[:, None] & m_d[None, :]
    last = tl.maximum(seq_len - 1, 0)
    page = tl.load(p_table + last // PAGE_SIZE).to(tl.int64)
    mine = (lo < hi) & (hi == seq_len)
    end = hi
    if ROPE:
        end = tl.minimum(hi, last)
    if (page == 0) | (first >= end):
        end = lo
    p_q += i_b * stride_qt + i_h * GROUP * stride_qh
    p_new_k += i_b * stride_nkt + i_h * stride_nkh
    p_new_v += i_b * stride_nvt + i_h * stride_nvh
    o_new = page * stride_n + last % PAGE_SIZE * stride_p

    b_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float16 if WORDS else p_q.dtype.element_ty)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WORDS:
        b_even, b_odd = tl.split(tl.reshape(b_acc, (BLOCK_M, BLOCK_D // 2, 2)))
        p_words = p_v_head.to(tl.pointer_type(tl.int16))
        o_w = tl.arange(0, BLOCK_D // 2)
    if (lo >= end) | (not EARLY):
        b_queries, b_max, b_sum, b_acc = _begin(
            p_q, p_new_k, p_new_v, p_cos_sin, p_positions + i_b, p_q_weight, p_k_weight, eps,
            p_k_head + o_new, p_v_head + o_new, scale_log2, stride_qh, stride_cs, mine, page > 0,
            GROUP, HEAD_DIM, HALF, ROPE, NORM, BLOCK_M, BLOCK_D, EARLY,
        )  # fmt: skip
        if WORDS:
            b_queries = as_float16(b_queries)
            b_even, b_odd = tl.split(tl.reshape(b_acc, (BLOCK_M, BLOCK_D // 2, 2)))
        b_q = b_queries
    last_page = (end - 1) // PAGE_SIZE
    for i_n in range(lo, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        if WINDOW > 0:
            m_n = m_n & (o_n >= first)
        # Places that aren't the sequence's may hold anything: scores of such keys are masked, values are not
        # read.
        p_entry = p_table + tl.minimum(o_n // PAGE_SIZE, last_page)
        if DIRECT:
            b_page = load_at_once(p_entry).to(tl.int64)
        else:
            b_page = tl.load(p_entry).to(tl.int64)
        b_row = (b_page * stride_n + o_n % PAGE_SIZE * stride_p)[:, None]
        b_at = b_row + o_d[None, :]
        if HEAD_DIM == BLOCK_D:
            b_k = tl.load(p_k_head + b_at)
        else:
            b_k = tl.load(p_k_head + b_at, mask=m_d[None, :], other=0.0)
        if WORDS:
            m_words = m_n[:, None] & (o_w < HEAD_DIM // 2)[None, :]
            b_words = tl.load(p_words + b_row // 2 + o_w[None, :], mask=m_words, other=0)
        elif HEAD_DIM == BLOCK_D:
            b_v = tl.load(p_v_head + b_at, mask=m_n[:, None], other=0.0)
        else:
            b_v = tl.load(p_v_head + b_at, mask=m_n[:, None] & m_d[None, :], other=0.0)
        if EARLY and i_n == lo:
            b_queries, b_max, b_sum, b_acc = _begin(
                p_q, p_new_k, p_new_v, p_cos_sin, p_positions + i_b, p_q_weight, p_k_weight, eps,
                p_k_head + o_new, p_v_head + o_new, scale_log2, stride_qh, stride_cs, mine, page > 0,
                GROUP, HEAD_DIM, HALF, ROPE, NORM, BLOCK_M, BLOCK_D, EARLY,
            )  # fmt: skip
            if WORDS:
                b_queries = as_float16(b_queries)
                b_even, b_odd = tl.split(tl.reshape(b_acc, (BLOCK_M, BLOCK_D // 2, 2)))
            b_q = b_queries
        b_k = b_k.to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_shrink = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_p = b_p.to(b_q.dtype)
        if WORDS:
            b_low, b_high = words_as_float16(b_words, ASM)
            b_even = b_even * b_shrink[:, None] + tl.dot(b_p, b_low)
            b_odd = b_odd * b_shrink[:, None] + tl.dot(b_p, b_high)
        else:
            b_acc = b_acc * b_shrink[:, None]
            b_acc += tl.dot(b_p, b_v.to(b_q.dtype), input_precision=PRECISION)
        b_max = b_new

    if WORDS:
        b_acc = tl.interleave(b_even, b_odd)
    b_out = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
    p_o = p_out + i_b * stride_ot + (i_h * GROUP + o_m)[:, None] * stride_oh + o_d[None, :]
    if PARTIAL:
        heads = tl.num_programs(0) * GROUP  # parts lie in memory one after another, their heads inside
        p_part += i_h * GROUP * HEAD_DIM
        p_lse += i_h * GROUP
        b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(tl.where(b_sum > 0.0, b_sum, 1.0)), float("-inf"))
        if PLANNED and parts <= 1:
            tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_md)
        else:
            if lo < hi:
                p_x = p_part + i_part * heads * HEAD_DIM + o_m[:, None] * HEAD_DIM + o_d[None, :]
                tl.store(p_x, b_out, mask=m_md)
            tl.store(p_lse + i_part * heads + o_m, b_lse, mask=m_m)
            if PLANNED:
                tl.debug_barrier()  # all of the part is stored before this program counts as arrived
                p_count = p_arrived + i_b * tl.num_programs(0) + i_h
                if tl.atomic_add(p_count, 1, sem="acq_rel", scope="gpu") == parts - 1:
                    tl.store(p_count, 0)
                    p_part += i_first * heads * HEAD_DIM
                    p_lse += i_first * heads
                    b_out = join(p_part, p_lse, parts, heads, o_m, o_d, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
                    tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_md)
    else:
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_md)


class Tile(NamedTuple):
    block_n: int
    warps: int
    stages: int
    registers: int | None = None  # a thread, at most


class Rope(NamedTuple):
    """What `rope_cache.rope_and_cache` takes besides q, for its work to be done on the way."""

    k: Tensor
    v: Tensor
    cos_sin: Tensor
    norm: QkNorm | None = None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """Zeroed counters, which every launch leaves at zero; one stream at a time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


# What won on an H200; us of a chain of calls, with the step's own token, for what it took when loads began
# behind the kernel in front and eight sequences were planned: one of 32768 tokens 21.3/24.6, of 4096 7.2/7.7,
# of 512 4.9/6.1; four of 512 6.0/8.4, of 4096 12.7/15.8; eight of 512 6.7/9.7, of 4096 23.9/26.5, of 200 to
# 3,800 14.4/18.6.
ONE_TILE = Tile(64, 4, 4)
FEW_TILE = Tile(64, 4, 3, 144)
TILE = Tile(64, 4, 2, 128)
FP8_ONE_TILE = Tile(64, 4, 3, 128)
FP8_TILE = Tile(128, 4, 3, 128)  # as many bytes a block; us of 128 sequences of 4096: 133 (floor 128)
LARGE_TILE = Tile(32, 4, 3)  # for float32 and large heads


def num_splits(num_seqs: int, num_kv_heads: int, context: int, block_n: int, programs: int) -> int:
    """How many of so many programs share a context of up to `context` tokens; nothing is read from the
    device."""
    return max(1, min(programs // (num_seqs * num_kv_heads), MAX_SPLITS, context // block_n))


def _slots(num_kv_heads: int, device: torch.device) -> int:
    return max(1, PROGRAMS_PER_SM * multiprocessors(device) // num_kv_heads)


def _plan(batch: AttentionBatch, slots: int, block_n: int, sliding_window: int) -> Tensor:
    """decode_plan's items for the batch's decodes, made for the first layer that asks."""
    key = ("decode", slots, block_n, sliding_window)
    items: Tensor | None = batch.plans.get(key)
    if items is None:
        lengths = batch.seq_lens[: batch.num_decodes]
        items = batch.plans[key] = plan_decodes_triton(lengths, slots, block_n, sliding_window)
    return items


def decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int,
    out: Tensor,
    rope: Rope | None = None,
    *,
    splits: int | None = None,
    slots: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Attention of the batch's first num_decodes rows: q [T, Hq, D] -> the same rows of out [T, Hq, D].

    Args:
        q: last dimension contiguous.
        k_cache: [N, Hkv, P, D], last dimension contiguous; of q's type or another (cache_types.py).
        v_cache: like k_cache, of the same strides.
        batch: rows of length 0 (padding of a graph) give zeros.
        scale: factor of the scores, before the softmax.
        sliding_window: tokens visible to a query, itself included; 0: all.
        out: contiguous.
        rope: q isn't rotated yet (nor normalised), and the rows' keys and values [T, Hkv, D], last dimension
            contiguous, aren't in the cache yet.
        splits: programs a context, where there are few; default: from the batch's shape and the device.
        slots: programs of a KV head that the device runs at a time, where there are many contexts.
        tile: how a program walks it; default: by type and head size.
    """
    num_seqs, device = batch.num_decodes, q.device
    _, q_heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1:3]
    exact = q.dtype == torch.float32
    few = num_seqs <= FEW_SEQS
    large = exact or dim > 128
    one = num_seqs == 1 and not large and pdl.supported(device)
    if tile is None:
        in_fp8 = k_cache.dtype == FP8
        ones, some, many = (FP8_ONE_TILE, FP8_TILE, FP8_TILE) if in_fp8 else (ONE_TILE, FEW_TILE, TILE)
        tile = LARGE_TILE if large else ones if one else some if few else many
    block_n, block_d = tile.block_n, triton.next_power_of_2(dim)
    items = parts = lse = out
    count = num_seqs
    if few:
        context = min(batch.max_seq_len, sliding_window) if sliding_window else batch.max_seq_len
        if splits is None:
            programs = (ONE_PROGRAMS_PER_SM if one else FEW_PROGRAMS_PER_SM) * multiprocessors(device)
            splits = num_splits(num_seqs, kv_heads, context, block_n, programs)
        count, grid = num_seqs * splits, (kv_heads, num_seqs, splits)
    else:
        splits = 1
        items = _plan(batch, slots or _slots(kv_heads, device), block_n, sliding_window)
        count, grid = len(items), (kv_heads, len(items), 1)
    if splits > 1 or not few:
        parts = torch.empty((count, q_heads, dim), dtype=torch.float32, device=device)
        lse = torch.empty((count, q_heads), dtype=torch.float32, device=device)
    # Programs that start while others still hold some multiprocessors spread unevenly. That costs more than
    # an early start gains, unless there are few.
    early = pdl.launch(device) if few else {"PDL": False}
    new_k, new_v, cos_sin, norm = rope or Rope(q, q, q[0])
    _decode_kernel[grid](
        q, new_k, new_v, cos_sin, *(norm or QkNorm(q, q, 0.0)), k_cache, v_cache, out, parts, lse,
        _arrivals(device, triton.next_power_of_2(num_seqs * kv_heads)), items, batch.block_tables,
        batch.seq_lens, batch.positions, scale * LOG2_E,
        *q.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], cos_sin.stride(0),
        *k_cache.stride()[:3], *out.stride()[:2], batch.block_tables.stride(0), splits,
        GROUP=q_heads // kv_heads, HEAD_DIM=dim, HALF=cos_sin.shape[1] // 2, PAGE_SIZE=page_size,
        WINDOW=sliding_window, ROPE=rope is not None, NORM=norm is not None, PARTIAL=splits > 1 or not few,
        PLANNED=not few, PRECISION="ieee" if exact else "tf32",
        BLOCK_M=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        BLOCK_N=block_n, BLOCK_D=block_d, DIRECT=early["PDL"], ASM=q.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **early,
    )  # fmt: skip
    if splits > 1 and few:
        join_splits_triton(parts, lse, out, batch.seq_lens, splits, sliding_window, block_n)
