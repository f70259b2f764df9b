"""Decode attention over the paged KV cache: one query token a sequence, split over the context.

    out[b, h] = softmax(scale · q[b, h] · K_bᵀ) · V_b        K_b, V_b: keys and values sequence b may see

Flash-decoding: every (sequence, KV head, split) program walks its share of the context with a running maximum
and sum (Milakov & Gimelshein 2018, arXiv:1805.02867), all query heads of the KV head at once as the rows of
one `tl.dot`; a second kernel joins the splits by their log-sum-exp. The number of splits is part of the
grid, but which tokens a split owns is derived on the device from seq_lens, so one captured graph serves
every length.

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
from kernels.pdl import begin, prefetch

LOG2_E = math.log2(math.e)
MAX_SPLITS = 64
EARLY_SEQS = 8
PROGRAMS_PER_SM = 3  # what registers (about 160 a thread on sm_90) leave room for: one full wave


@triton.jit
def _decode_range(
    b_acc,
    b_max,
    b_sum,
    b_q,
    p_k_head,
    p_v_head,
    p_table,
    m_d,
    lo,
    hi,
    first,
    scale_log2,
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys lo..hi. Unmasked: whole blocks, all visible and in pages that the sequence owns."""
    for i_n in range(lo, hi, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_slot = o_n % PAGE_SIZE
        if MASKED:
            m_n = (o_n >= first) & (o_n < hi)
            b_page = tl.load(p_table + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
            m_n = m_n & (b_page > 0)
            m_nd = m_n[:, None] & m_d[None, :]
            b_k = tl.load(p_k_head + (b_page * stride_kn + b_slot * stride_kp)[:, None], mask=m_nd, other=0.0)
            b_v = tl.load(p_v_head + (b_page * stride_vn + b_slot * stride_vp)[:, None], mask=m_nd, other=0.0)
        else:
            b_page = tl.load(p_table + o_n // PAGE_SIZE).to(tl.int64)
            p_keys = p_k_head + (b_page * stride_kn + b_slot * stride_kp)[:, None]
            p_values = p_v_head + (b_page * stride_vn + b_slot * stride_vp)[:, None]
            if EVEN_D:
                b_k, b_v = tl.load(p_keys), tl.load(p_values)
            else:
                b_k = tl.load(p_keys, mask=m_d[None, :], other=0.0)
                b_v = tl.load(p_values, mask=m_d[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        if MASKED:
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit
def _prefetch_block(
    p_k_head, p_v_head, p_table, lo, hi, stride_kn, stride_kp, stride_vn, stride_vp,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first block of a program's keys and values."""
    LINE: tl.constexpr = 1024 // p_k_head.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (HEAD_DIM + LINE - 1) // LINE
    o_n = tl.minimum(lo + tl.arange(0, BLOCK_N), hi - 1)
    o_d = tl.arange(0, triton.next_power_of_2(LINES)) * LINE
    b_page = tl.load(p_table + o_n // PAGE_SIZE).to(tl.int64)
    b_slot = o_n % PAGE_SIZE
    prefetch(p_k_head + (b_page * stride_kn + b_slot * stride_kp)[:, None] + o_d[None, :])
    prefetch(p_v_head + (b_page * stride_vn + b_slot * stride_vp)[:, None] + o_d[None, :])


@triton.jit(do_not_specialize=["stride_table", "splits"])
def _decode_split_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_block_tables,
    p_seq_lens,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_kp,
    stride_vn,
    stride_vh,
    stride_vp,
    stride_ot,
    stride_oh,
    stride_os,
    stride_table,
    splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    i_h = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_head = i_h * GROUP + o_m
    m_m = o_m < GROUP
    m_d = o_d < HEAD_DIM

    seq_len = tl.load(p_seq_lens + i_b)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    first_block = first // BLOCK_N
    blocks = (seq_len + BLOCK_N - 1) // BLOCK_N - first_block
    blocks_per_split = (blocks + splits - 1) // splits
    lo = (first_block + i_s * blocks_per_split) * BLOCK_N
    hi = tl.minimum(lo + blocks_per_split * BLOCK_N, seq_len)
    if PDL:  # lengths and tables are older than the step's first kernel, as are all keys but the last
        gdc_launch_dependents()
        if lo < hi:
            _prefetch_block(
                p_k + i_h.to(tl.int64) * stride_kh, p_v + i_h.to(tl.int64) * stride_vh,
                p_block_tables + i_b * stride_table, lo, hi, stride_kn, stride_kp, stride_vn, stride_vp,
                HEAD_DIM, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
        gdc_wait()

    b_q = tl.load(
        p_q + i_b * stride_qt + o_head[:, None] * stride_qh + o_d[None, :],
        mask=m_m[:, None] & m_d[None, :],
        other=0.0,
    )
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    b_acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    p_table = p_block_tables + i_b * stride_table
    p_k_head = p_k + i_h.to(tl.int64) * stride_kh + o_d[None, :]
    p_v_head = p_v + i_h.to(tl.int64) * stride_vh + o_d[None, :]
    EVEN_D: tl.constexpr = HEAD_DIM == BLOCK_D
    full_lo = lo
    if WINDOW > 0:
        full_lo = tl.minimum(tl.maximum(lo, (first + BLOCK_N - 1) // BLOCK_N * BLOCK_N), tl.maximum(hi, lo))
        b_acc, b_max, b_sum = _decode_range(
            b_acc, b_max, b_sum, b_q, p_k_head, p_v_head, p_table, m_d, lo, full_lo, first, scale_log2,
            stride_kn, stride_kp, stride_vn, stride_vp, PAGE_SIZE, PRECISION, BLOCK_N, EVEN_D, True,
        )  # fmt: skip
    full_hi = tl.maximum(full_lo, hi // BLOCK_N * BLOCK_N)
    b_acc, b_max, b_sum = _decode_range(
        b_acc, b_max, b_sum, b_q, p_k_head, p_v_head, p_table, m_d, full_lo, full_hi, first, scale_log2,
        stride_kn, stride_kp, stride_vn, stride_vp, PAGE_SIZE, PRECISION, BLOCK_N, EVEN_D, False,
    )  # fmt: skip
    b_acc, b_max, b_sum = _decode_range(
        b_acc, b_max, b_sum, b_q, p_k_head, p_v_head, p_table, m_d, full_hi, hi, first, scale_log2,
        stride_kn, stride_kp, stride_vn, stride_vp, PAGE_SIZE, PRECISION, BLOCK_N, EVEN_D, True,
    )  # fmt: skip

    b_out = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
    p_o = p_out + i_b * stride_ot + o_head[:, None] * stride_oh + i_s * stride_os + o_d[None, :]
    m_o = m_m[:, None] & m_d[None, :]
    if PARTIAL:
        if lo < hi:
            tl.store(p_o, b_out, mask=m_o)
        b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(tl.where(b_sum > 0.0, b_sum, 1.0)), float("-inf"))
        heads = tl.num_programs(0) * GROUP
        tl.store(p_lse + (i_b * heads + o_head) * splits + i_s, b_lse, mask=m_m)
    else:
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_o)


@triton.jit(do_not_specialize=["splits"])
def _decode_combine_kernel(
    p_partial,
    p_lse,
    p_out,
    stride_ot,
    stride_oh,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    i_row = (i_b * HEADS + i_h) * splits
    b_lse = tl.load(p_lse + i_row + o_s, mask=o_s < splits, other=float("-inf"))
    m_s = b_lse > float("-inf")
    b_max = tl.max(b_lse, axis=0)
    b_weight = tl.where(m_s, tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max)), 0.0)
    b_x = tl.load(
        p_partial + (i_row + o_s)[:, None] * HEAD_DIM + o_d[None, :],
        mask=m_s[:, None] & m_d[None, :],
        other=0.0,
    )
    b_total = tl.sum(b_weight, axis=0)
    b_out = tl.sum(b_x * b_weight[:, None], axis=0) / tl.where(b_total > 0.0, b_total, 1.0)
    tl.store(p_out + i_b * stride_ot + i_h * stride_oh + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


class Tile(NamedTuple):
    block_n: int
    warps: int
    stages: int


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_splits(num_seqs: int, num_kv_heads: int, context: int, block_n: int, multiprocessors: int) -> int:
    """How many programs share a context of up to `context` tokens; nothing is read from the device."""
    spare = PROGRAMS_PER_SM * multiprocessors // (num_seqs * num_kv_heads)
    return max(1, min(spare, MAX_SPLITS, context // block_n))


def decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int,
    out: Tensor,
    splits: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Attention of the batch's first num_decodes rows: q [T, Hq, D] -> the same rows of out [T, Hq, D].

    Args:
        q: last dimension contiguous.
        k_cache: [N, Hkv, P, D], last dimension contiguous.
        v_cache: like k_cache.
        batch: rows of length 0 (padding of a graph) give zeros.
        scale: factor of the scores, before the softmax.
        sliding_window: tokens visible to a query, itself included; 0: all.
        out: contiguous.
        splits: programs a context; default: from the batch's shape and the device.
        tile: how a program walks it; default: by type and head size.
    """
    num_seqs = batch.num_decodes
    _, q_heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1:3]
    exact = q.dtype == torch.float32
    if tile is None:
        tile = Tile(32, 4, 3) if exact or dim > 128 else Tile(64, 4, 2)
    block_n = tile.block_n
    context = min(batch.max_seq_len, sliding_window) if sliding_window else batch.max_seq_len
    if splits is None:
        splits = num_splits(num_seqs, kv_heads, context, block_n, _multiprocessors(q.device))
    block_d = triton.next_power_of_2(dim)
    # Programs that start while others still hold some multiprocessors spread unevenly. That costs more than
    # an early start gains, unless there are few.
    early = pdl.launch(q.device) if num_seqs < EARLY_SEQS else {"PDL": False}
    if splits == 1:
        partial, lse, strides = out, out, (out.stride(0), out.stride(1), 0)
    else:
        partial = torch.empty((num_seqs, q_heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_seqs, q_heads, splits), dtype=torch.float32, device=q.device)
        strides = (partial.stride(0), partial.stride(1), partial.stride(2))
    _decode_split_kernel[(kv_heads, num_seqs, splits)](
        q,
        k_cache,
        v_cache,
        partial,
        lse,
        batch.block_tables,
        batch.seq_lens,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *strides,
        batch.block_tables.stride(0),
        splits,
        GROUP=q_heads // kv_heads,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=sliding_window,
        PARTIAL=splits > 1,
        PRECISION="ieee" if exact else "tf32",
        BLOCK_M=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early,
    )
    if splits > 1:
        _decode_combine_kernel[(num_seqs, q_heads)](
            partial,
            lse,
            out,
            *out.stride()[:2],
            splits,
            HEADS=q_heads,
            HEAD_DIM=dim,
            BLOCK_S=max(16, triton.next_power_of_2(splits)),
            BLOCK_D=block_d,
            num_warps=4,
            **pdl.launch(q.device),
        )
