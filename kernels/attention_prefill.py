"""Prefill attention over the paged KV cache: chunks of query tokens against their sequence's whole context.

    out[i, h] = softmax(scale · q[i, h] · K[:p + 1]ᵀ) · V[:p + 1]        p: position of row i in its sequence

FlashAttention-2's loop (Dao 2023, arXiv:2307.08691) over keys gathered through the block table. A program
owns BLOCK_M query rows of one head; blocks that no row may see are skipped, and only those on the edge of
what is visible (the diagonal, and the far end of a sliding window) pay for a mask.

A few rows over a long context (the next message of a conversation, a small piece of a long prompt) would
leave most of a card idle while a few programs go through all the keys. Then several programs share a tile's
keys, as in flash-decoding, and a second kernel joins what they found.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_decode import LOG2_E, multiprocessors
from kernels.batch import AttentionBatch


@triton.jit
def _flash_range(
    b_acc,
    b_max,
    b_sum,
    b_q,
    p_k_head,
    p_v_head,
    p_table,
    o_pos,
    m_d,
    lo,
    hi,
    scale_log2,
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys lo..hi for rows at positions o_pos. Unmasked: whole blocks, and every row sees every key."""
    for i_n in range(lo, hi, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        if MASKED:
            m_n = o_n < hi
            b_page = tl.load(p_table + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
            m_nd = (m_n & (b_page > 0))[:, None] & m_d[None, :]
        else:
            b_page = tl.load(p_table + o_n // PAGE_SIZE).to(tl.int64)
            m_nd = tl.full([BLOCK_N, 1], 1, tl.int1) & m_d[None, :]
        b_slot = o_n % PAGE_SIZE
        b_k = tl.load(p_k_head + (b_page * stride_kn + b_slot * stride_kp)[:, None], mask=m_nd, other=0.0)
        b_v = tl.load(p_v_head + (b_page * stride_vn + b_slot * stride_vp)[:, None], mask=m_nd, other=0.0)
        b_k = b_k.to(b_q.dtype)
        b_v = b_v.to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        if MASKED:
            m_s = (o_n[None, :] <= o_pos[:, None]) & m_n[None, :]
            if WINDOW > 0:
                m_s = m_s & (o_n[None, :] > o_pos[:, None] - WINDOW)
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["stride_table", "first_seq", "part_rows"])
def _prefill_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_part,
    p_lse,
    p_block_tables,
    p_seq_lens,
    p_query_starts,
    first_seq,
    scale_log2,
    part_rows,
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
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # Heads vary fastest, so that a group's heads meet in the L2 cache; late rows have the most keys and go
    # first.
    i_h = tl.program_id(0)
    i_m = (tl.num_programs(1) - 1 - tl.program_id(1)) // SPLITS
    i_s = tl.program_id(1) % SPLITS
    i_b = (first_seq + tl.program_id(2)).to(tl.int64)
    start = tl.load(p_query_starts + i_b)
    rows = tl.load(p_query_starts + i_b + 1) - start
    if i_m * BLOCK_M < rows:
        seq_len = tl.load(p_seq_lens + i_b)
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        m_d = o_d < HEAD_DIM
        m_md = (o_m < rows)[:, None] & m_d[None, :]
        o_row = (start + o_m).to(tl.int64)
        first_pos = seq_len - rows + i_m * BLOCK_M
        o_pos = first_pos + tl.arange(0, BLOCK_M)
        b_q = tl.load(p_q + o_row[:, None] * stride_qt + i_h * stride_qh + o_d[None, :], mask=m_md, other=0.0)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.full([BLOCK_M], 0.0, tl.float32)
        b_acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        i_kv = (i_h // GROUP).to(tl.int64)
        p_k_head = p_k + i_kv * stride_kh + o_d[None, :]
        p_v_head = p_v + i_kv * stride_vh + o_d[None, :]
        p_table = p_block_tables + i_b * stride_table

        hi = tl.minimum(first_pos + BLOCK_M, seq_len)
        lo = 0
        full_lo = 0
        full_hi = (first_pos + 1) // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            lo = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            full_lo = (tl.maximum(hi - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            full_lo = tl.minimum(full_lo, full_hi)
        if SPLITS > 1:
            part = _part(hi - lo, SPLITS, BLOCK_N)
            lo += i_s * part
            hi = tl.minimum(lo + part, hi)
            full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
            full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)
        if WINDOW > 0:
            b_acc, b_max, b_sum = _flash_range(
                b_acc, b_max, b_sum, b_q, p_k_head, p_v_head, p_table, o_pos, m_d, lo, full_lo, scale_log2,
                stride_kn, stride_kp, stride_vn, stride_vp, PAGE_SIZE, WINDOW, PRECISION, BLOCK_N, True,
            )  # fmt: skip
        b_acc, b_max, b_sum = _flash_range(
            b_acc, b_max, b_sum, b_q, p_k_head, p_v_head, p_table, o_pos, m_d, full_lo, full_hi, scale_log2,
            stride_kn, stride_kp, stride_vn, stride_vp, PAGE_SIZE, WINDOW, PRECISION, BLOCK_N, False,
        )  # fmt: skip
        b_acc, b_max, b_sum = _flash_range(
            b_acc, b_max, b_sum, b_q, p_k_head, p_v_head, p_table, o_pos, m_d, full_hi, hi, scale_log2,
            stride_kn, stride_kp, stride_vn, stride_vp, PAGE_SIZE, WINDOW, PRECISION, BLOCK_N, True,
        )  # fmt: skip
        b_out = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
        if SPLITS == 1:
            p_o = p_out + o_row[:, None] * stride_ot + i_h * stride_oh + o_d[None, :]
            tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_md)
        else:
            # Of a part without keys too: what it weighs must be known, and its rows aren't read.
            b_part = (i_s * part_rows + o_row) * tl.num_programs(0) + i_h
            b_lse = b_max + tl.log2(tl.where(b_sum > 0.0, b_sum, 1.0))
            tl.store(p_lse + b_part, b_lse, mask=o_m < rows)
            if hi > lo:
                tl.store(p_part + b_part[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_md)


@triton.jit
def _part(keys, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many of a tile's keys each program takes: whole blocks, and not so few that joining costs more."""
    blocks = (keys + BLOCK_N - 1) // BLOCK_N
    return tl.maximum((blocks + SPLITS - 1) // SPLITS, 8) * BLOCK_N


@triton.jit(do_not_specialize=["first_seq", "last_seq", "part_rows"])
def _join_kernel(
    p_part, p_lse, p_out, p_query_starts, first_seq, last_seq, part_rows, stride_ot, stride_oh,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A row of a head: its parts, each weighted by the sum of its exponentials."""
    i_h = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    if (i_row >= tl.load(p_query_starts + first_seq)) & (i_row < tl.load(p_query_starts + last_seq)):
        o_s = tl.arange(0, BLOCK_S)
        o_d = tl.arange(0, BLOCK_D)
        b_part = (o_s * part_rows + i_row) * tl.num_programs(0) + i_h
        b_lse = tl.load(p_lse + b_part, mask=o_s < SPLITS, other=float("-inf"))
        m_s = b_lse > float("-inf")
        m_sd = m_s[:, None] & (o_d < HEAD_DIM)[None, :]
        b_x = tl.load(p_part + b_part[:, None] * HEAD_DIM + o_d[None, :], mask=m_sd, other=0.0)
        b_weight = tl.where(m_s, tl.exp2(b_lse - tl.max(b_lse, axis=0)), 0.0)
        b_out = tl.sum(b_x * b_weight[:, None], axis=0) / tl.sum(b_weight, axis=0)
        p_o = p_out + i_row * stride_ot + i_h * stride_oh + o_d
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=o_d < HEAD_DIM)


def _blocks(dim: int, exact: bool, rows: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages): what fits registers and shared memory of sm_80 and later."""
    if exact:
        tile = (32, 32, 4, 2)
    elif dim > 128:
        tile = (64, 64, 8, 2)
    elif dim > 64:
        tile = (64, 64, 4, 3)
    else:
        tile = (128, 64, 4, 3)
    block_m, block_n, warps, stages = tile
    short = max(16, triton.next_power_of_2(rows))
    if short < block_m:
        return short, block_n, 4, stages
    return block_m, block_n, warps, stages


MOST_SPLITS = 16
TILES_PER_SM = 2  # that fit at a time


def _splits(rows: int, block_m: int, q_heads: int, max_seq_len: int, device: torch.device) -> int:
    """How many programs share a tile's keys: as many as the card has room for, whatever rows are prompts'."""
    tiles: int = q_heads * triton.cdiv(rows, block_m)
    room = TILES_PER_SM * multiprocessors(device) // tiles
    return max(1, min(MOST_SPLITS, room, max_seq_len // 1024))


def prefill_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int,
    out: Tensor,
    splits: int | None = None,
) -> None:
    """Attention of the sequences behind the batch's decodes: rows of q [T, Hq, D] -> the same rows of out.

    Arguments as in `decode_attention_triton`. Rows that belong to no sequence are left alone. `splits`: so
    many programs share a tile's keys; None: what suits the card.
    """
    sequences = batch.seq_lens.shape[0] - batch.num_decodes
    tokens, q_heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1:3]
    exact = q.dtype == torch.float32
    block_m, block_n, warps, stages = _blocks(dim, exact, batch.max_query_len)
    if splits is None:
        splits = _splits(tokens, block_m, q_heads, batch.max_seq_len, q.device)
    parts, lse = out, out  # not touched
    if splits > 1:
        parts = torch.empty((splits, tokens, q_heads, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, tokens, q_heads), dtype=torch.float32, device=q.device)
    _prefill_kernel[(q_heads, triton.cdiv(batch.max_query_len, block_m) * splits, sequences)](
        q,
        k_cache,
        v_cache,
        out,
        parts,
        lse,
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        batch.num_decodes,
        scale * LOG2_E,
        tokens,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        batch.block_tables.stride(0),
        GROUP=q_heads // kv_heads,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=sliding_window,
        PRECISION="ieee" if exact else "tf32",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(dim),
        SPLITS=splits,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _join_kernel[(q_heads, tokens)](
            parts, lse, out, batch.query_starts, batch.num_decodes, batch.seq_lens.shape[0], tokens,
            *out.stride()[:2], HEAD_DIM=dim, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
