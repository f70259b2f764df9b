"""Prefill attention for long contexts: pages are gathered once, then read by the tensor copy engine.

What `attention_prefill` does, in two kernels: the first copies the sequences' keys and values out of their
pages into dense rows, each of which the second reads some hundred times over. It pays where the reads are
many, and on cards (Hopper on) whose copy engine moves whole tiles to shared memory with no threads' help.
On Hopper itself the second one is attention_wgmma.py's.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_decode import LOG2_E
from kernels.batch import AttentionBatch


class Tile(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int


GATHER_BLOCK = 64  # positions a program of the gather


@triton.jit(do_not_specialize=["stride_table", "first_seq", "padded"])
def _gather_kernel(
    p_k, p_v, p_dense_k, p_dense_v, p_block_tables, p_seq_lens, first_seq, padded,
    stride_kn, stride_kh, stride_kp, stride_vn, stride_vh, stride_vp, stride_table,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, HEAD_DIM)
    m_n = o_n < tl.load(p_seq_lens + first_seq + i_b)
    p_table = p_block_tables + (first_seq + i_b) * stride_table
    b_page = tl.load(p_table + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
    m_nd = (m_n & (b_page > 0))[:, None]
    b_slot = o_n % PAGE_SIZE
    o_out = (((i_b * tl.num_programs(1) + i_h) * padded + o_n) * HEAD_DIM)[:, None] + o_d[None, :]
    p_keys = p_k + i_h * stride_kh + (b_page * stride_kn + b_slot * stride_kp)[:, None] + o_d[None, :]
    p_values = p_v + i_h * stride_vh + (b_page * stride_vn + b_slot * stride_vp)[:, None] + o_d[None, :]
    dtype = p_dense_k.dtype.element_ty
    tl.store(p_dense_k + o_out, tl.load(p_keys, mask=m_nd, other=0.0).to(dtype))
    tl.store(p_dense_v + o_out, tl.load(p_values, mask=m_nd, other=0.0).to(dtype))


@triton.jit
def _dense_range(
    b_acc, b_max, b_sum, b_q, d_k, d_v, i_row, o_pos, lo, hi, scale_log2,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys lo..hi, whole blocks, for rows at positions o_pos. Unmasked: every row sees every key."""
    for i_n in range(lo, hi, BLOCK_N):
        b_s = tl.dot(b_q, d_k.load([i_row + i_n, 0]).T)
        if MASKED:
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_s = o_n[None, :] <= o_pos[:, None]
            if WINDOW > 0:
                m_s = m_s & (o_n[None, :] > o_pos[:, None] - WINDOW)
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1) * scale_log2)
        if MASKED:
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        else:
            b_safe = b_new
        b_p = tl.exp2(b_s * scale_log2 - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_shrink[:, None]
        b_v = d_v.load([i_row + i_n, 0])
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["first_seq", "padded"])
def _dense_kernel(
    p_q, d_k, d_v, p_out, p_seq_lens, p_query_starts, first_seq, padded, scale_log2,
    stride_qt, stride_qh, stride_ot, stride_oh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest, so that a group's heads meet in the L2 cache; late rows have the most keys and go
    # first.
    i_h = tl.program_id(0)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)
    i_b = tl.program_id(2)
    start = tl.load(p_query_starts + first_seq + i_b)
    rows = tl.load(p_query_starts + first_seq + i_b + 1) - start
    if i_m * BLOCK_M < rows:
        seq_len = tl.load(p_seq_lens + first_seq + i_b)
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, HEAD_DIM)
        m_m = (o_m < rows)[:, None]
        o_row = (start + o_m).to(tl.int64)
        first_pos = seq_len - rows + i_m * BLOCK_M
        o_pos = first_pos + tl.arange(0, BLOCK_M)
        b_q = tl.load(p_q + o_row[:, None] * stride_qt + i_h * stride_qh + o_d[None, :], mask=m_m, other=0.0)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.full([BLOCK_M], 0.0, tl.float32)
        b_acc = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
        i_row = (i_b * (tl.num_programs(0) // GROUP) + i_h // GROUP) * padded

        hi = tl.minimum(first_pos + BLOCK_M, seq_len)
        full_hi = (first_pos + 1) // BLOCK_N * BLOCK_N
        full_lo = 0
        if WINDOW > 0:
            lo = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            full_lo = (tl.maximum(hi - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            full_lo = tl.minimum(full_lo, full_hi)
            b_acc, b_max, b_sum = _dense_range(
                b_acc,
                b_max,
                b_sum,
                b_q,
                d_k,
                d_v,
                i_row,
                o_pos,
                lo,
                full_lo,
                scale_log2,
                WINDOW,
                BLOCK_N,
                True,
            )
        b_acc, b_max, b_sum = _dense_range(
            b_acc,
            b_max,
            b_sum,
            b_q,
            d_k,
            d_v,
            i_row,
            o_pos,
            full_lo,
            full_hi,
            scale_log2,
            WINDOW,
            BLOCK_N,
            False,
        )
        b_acc, b_max, b_sum = _dense_range(
            b_acc, b_max, b_sum, b_q, d_k, d_v, i_row, o_pos, full_hi, hi, scale_log2, WINDOW, BLOCK_N, True
        )
        b_out = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
        p_o = p_out + o_row[:, None] * stride_ot + i_h * stride_oh + o_d[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_m)


DENSE_TOKENS = 65536  # most that are gathered: 128 MiB with 4 heads of 128 in 16 bits
DENSE_QUERIES = 256


def dense_is_faster(q: Tensor, k_cache: Tensor, batch: AttentionBatch) -> bool:
    """Whether `dense_attention_triton` takes this step, and in less time than reading pages does."""
    sequences = batch.seq_lens.shape[0] - batch.num_decodes
    return (
        q.is_cuda
        and q.dtype != torch.float32
        and q.shape[2] in (64, 128)
        and batch.max_query_len >= DENSE_QUERIES
        and sequences * batch.max_seq_len <= DENSE_TOKENS
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    )


def _gather(
    k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, padded: int, dtype: torch.dtype
) -> Tensor:
    """Keys and values [2, sequences · Hkv · padded, D] of the sequences behind the decodes, zero behind a
    context's end."""
    sequences = batch.seq_lens.shape[0] - batch.num_decodes
    kv_heads, page_size, dim = k_cache.shape[1:]
    dense = torch.empty((2, sequences * kv_heads * padded, dim), dtype=dtype, device=k_cache.device)
    _gather_kernel[(padded // GATHER_BLOCK, kv_heads, sequences)](
        k_cache, v_cache, dense[0], dense[1], batch.block_tables, batch.seq_lens, batch.num_decodes, padded,
        *k_cache.stride()[:3], *v_cache.stride()[:3], batch.block_tables.stride(0),
        HEAD_DIM=dim, PAGE_SIZE=page_size, BLOCK_N=GATHER_BLOCK,
    )  # fmt: skip
    return dense


GLUON = "3.6."  # Triton's version: what its lower level promises differs from one to the next


def _has_wgmma(device: torch.device) -> bool:
    """Hopper's tensor instructions are Hopper's alone."""
    tested = triton.__version__.startswith(GLUON)
    return tested and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int,
    out: Tensor,
) -> None:
    """`prefill_attention_triton` for a head size of 64 or 128, in 16 bits.

    Takes memory for keys and values of (sequences behind the decodes) x max_seq_len tokens.
    """
    if not _has_wgmma(q.device):
        dense_attention_triton(q, k_cache, v_cache, batch, scale, sliding_window, out)
        return
    # Not at the top: others needn't pay for importing Gluon.
    from kernels.attention_wgmma import BLOCK_N, wgmma_attention

    padded = triton.cdiv(batch.max_seq_len, BLOCK_N) * BLOCK_N
    keys, values = _gather(k_cache, v_cache, batch, padded, q.dtype)
    wgmma_attention(q, keys, values, batch, padded, scale, sliding_window, out)


def dense_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int,
    out: Tensor,
    tile: Tile | None = None,
) -> None:
    """`dense_attention` by Triton's own pipelining."""
    sequences = batch.seq_lens.shape[0] - batch.num_decodes
    _, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if tile is None:
        tile = Tile(64, 64, 4, 3) if batch.max_seq_len <= 16384 else Tile(128, 128, 8, 3)
    padded = triton.cdiv(batch.max_seq_len, tile.block_n) * tile.block_n
    dense = _gather(k_cache, v_cache, batch, padded, q.dtype)
    block = [tile.block_n, dim]
    keys, values = (TensorDescriptor.from_tensor(side, block) for side in dense)
    _dense_kernel[(q_heads, triton.cdiv(batch.max_query_len, tile.block_m), sequences)](
        q, keys, values, out, batch.seq_lens, batch.query_starts, batch.num_decodes, padded, scale * LOG2_E,
        *q.stride()[:2], *out.stride()[:2],
        GROUP=q_heads // kv_heads, HEAD_DIM=dim, WINDOW=sliding_window,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
