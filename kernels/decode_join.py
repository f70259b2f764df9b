"""Attention over all of a context from that over each of its splits, by their log-sum-exp.

    out = Σ 2^(lse_s − max) · out_s / Σ 2^(lse_s − max)

In the program that finishes last, or by a kernel of many programs, each with all splits of a few dimensions
of a head, so that everything is read at once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import pdl
from kernels.pdl import begin

MAX_SPLITS = 128
BLOCK_D = 32


@triton.jit
def join(
    p_part, p_lse, parts, heads, o_m, o_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr = 4,
):  # fmt: skip
    """Attention over all of a context from that over each of its parts."""
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(0, parts, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            i_p = (i + j) * heads
            m_m = o_m < tl.where(i + j < parts, GROUP, 0)
            m_md = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
            b_lse = tl.load(p_lse + i_p + o_m, mask=m_m, other=float("-inf"), cache_modifier=".cg")
            p_x = p_part + i_p * HEAD_DIM + o_m[:, None] * HEAD_DIM + o_d[None, :]
            b_x = tl.load(p_x, mask=m_md, other=0.0, cache_modifier=".cg")
            b_new = tl.maximum(b_max, b_lse)
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_shrink, b_weight = tl.exp2(b_max - b_safe), tl.exp2(b_lse - b_safe)
            b_sum = b_sum * b_shrink + b_weight
            b_acc = b_acc * b_shrink[:, None] + b_x * b_weight[:, None]
            b_max = b_new
    return b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]


@triton.jit
def split_blocks(seq_len, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """A context's first block, how many there are from it on, and how many of them a split takes."""
    first_block = 0
    if WINDOW > 0:
        first_block = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N
    blocks = (seq_len + BLOCK_N - 1) // BLOCK_N - first_block
    return first_block, blocks, tl.maximum((blocks + splits - 1) // splits, 1)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    p_part, p_lse, p_out, p_seq_lens, stride_ot, stride_oh, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    _, blocks, blocks_per_split = split_blocks(tl.load(p_seq_lens + i_b), splits, WINDOW, BLOCK_N)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_s = o_s * blocks_per_split < blocks  # the others had nothing to do
    m_d = o_d < HEAD_DIM
    b_row = (i_b * splits + o_s) * HEADS + i_h
    begin(PDL)
    b_lse = tl.load(p_lse + b_row, mask=m_s, other=float("-inf"))
    p_x = p_part + b_row[:, None] * HEAD_DIM + o_d[None, :]
    b_x = tl.load(p_x, mask=m_s[:, None] & m_d[None, :], other=0.0)
    top = tl.max(b_lse, axis=0)
    b_weight = tl.exp2(b_lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(b_weight, axis=0)
    b_out = tl.sum(b_x * b_weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(p_out + i_b * stride_ot + i_h * stride_oh + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def join_splits_triton(
    parts: Tensor, lse: Tensor, out: Tensor, seq_lens: Tensor, splits: int, sliding_window: int, block_n: int
) -> None:
    """Join every context's splits.

    Args:
        parts: [B * splits, Hq, D] float32.
        lse: [B * splits, Hq] float32.
        out: [T, Hq, D], of which the first B rows are written.
        seq_lens: [B] or more: with the next three, which splits of a context were used (`split_blocks`).
        splits: programs a context.
        sliding_window: tokens visible to a query; 0: all.
        block_n: tokens a block.
    """
    count, heads, dim = parts.shape
    _join_kernel[(count // splits, heads, triton.cdiv(dim, BLOCK_D))](
        parts, lse, out, seq_lens, *out.stride()[:2], splits,
        HEADS=heads, HEAD_DIM=dim, WINDOW=sliding_window, BLOCK_N=block_n,
        BLOCK_S=max(16, triton.next_power_of_2(splits)), BLOCK_D=BLOCK_D,
        num_warps=4, **pdl.launch(parts.device),
    )  # fmt: skip
