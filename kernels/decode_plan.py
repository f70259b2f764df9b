"""Who computes what in decode attention: contexts cut so that no program works much longer than others.

A program's share is what each would get if the step's contexts were spread evenly over all that run at a
time (half of that where there are more contexts than programs). Pieces of a full share come first, then what
is left of each context, or all of it, the longest first, since programs start in that order. All of this is
derived on the device from the lengths, once a step for all layers, so one captured graph serves every mixture
of lengths.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of an item: sequence (-1: none), how many parts it has, where their results begin, which of them this is,
# first token, end, length.
FIELDS = tl.constexpr(8)


@triton.jit
def _store_items(p_items, o_item, m_item, i_b, parts, first_part, o_part, b_lo, b_hi, length):
    p_item = p_items + o_item * FIELDS
    tl.store(p_item, o_part * 0 + i_b, mask=m_item)
    tl.store(p_item + 1, o_part * 0 + parts, mask=m_item)
    tl.store(p_item + 2, o_part * 0 + first_part, mask=m_item)
    tl.store(p_item + 3, o_part, mask=m_item)
    tl.store(p_item + 4, b_lo, mask=m_item)
    tl.store(p_item + 5, b_hi, mask=m_item)
    tl.store(p_item + 6, o_part * 0 + length, mask=m_item)


@triton.jit(do_not_specialize=["sequences", "slots", "capacity"])
def _plan_kernel(
    p_lens, p_items, sequences, slots, capacity,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0)
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < sequences
    b_len = tl.load(p_lens + o_b, mask=m_b, other=0)
    b_first = tl.zeros([BLOCK_B], tl.int32)
    if WINDOW > 0:
        b_first = tl.maximum(b_len - WINDOW, 0) // BLOCK_N
    b_blocks = (b_len + BLOCK_N - 1) // BLOCK_N - b_first
    shares = tl.where(sequences > slots, 2 * slots, slots)
    share = tl.maximum((tl.sum(b_blocks, axis=0) + shares - 1) // shares, 1)
    # A quarter of a share or less isn't worth a program of its own: the last piece takes it along.
    b_full = tl.maximum((b_blocks + share - 1 - share // 4) // share - 1, 0)
    b_last = b_blocks - b_full * share

    m_own = o_b == i_b
    length = tl.sum(tl.where(m_own, b_len, 0), axis=0)
    first = tl.sum(tl.where(m_own, b_first, 0), axis=0)
    full = tl.sum(tl.where(m_own, b_full, 0), axis=0)
    last = tl.sum(tl.where(m_own, b_last, 0), axis=0)
    all_full = tl.sum(b_full, axis=0)
    full_before = tl.sum(tl.where(o_b < i_b, b_full, 0), axis=0)
    m_longer = ((b_last > last) | ((b_last == last) & (o_b < i_b))) & m_b
    place = all_full + tl.sum(m_longer.to(tl.int32), axis=0)
    for i in range(0, full + 1, BLOCK_P):
        o_p = i + tl.arange(0, BLOCK_P)
        b_lo = tl.minimum((first + o_p * share) * BLOCK_N, length)
        b_hi = tl.where(o_p < full, b_lo + share * BLOCK_N, length)
        o_item = tl.where(o_p < full, full_before + o_p, place)
        _store_items(p_items, o_item, o_p <= full, i_b, full + 1, full_before + i_b, o_p, b_lo, b_hi, length)
    if i_b == 0:
        for i in range(all_full + sequences, capacity, BLOCK_P):
            o_p = i + tl.arange(0, BLOCK_P)
            tl.store(p_items + o_p * FIELDS, o_p * 0 - 1, mask=o_p < capacity)


def plan_decodes_triton(seq_lens: Tensor, slots: int, block_n: int, sliding_window: int) -> Tensor:
    """Items [I, FIELDS] int32 that cover the contexts of seq_lens [S] int32 in blocks of block_n.

    Args:
        seq_lens: tokens a sequence has; 0: it gets an item of no tokens.
        slots: how many items the device works on at a time.
        block_n: tokens a block; items begin and end at multiples, or where the context does.
        sliding_window: tokens visible to a query, itself included; 0: all.
    """
    sequences = len(seq_lens)
    # Shares add up to all that there is, so there are at most as many full ones as shares.
    capacity = sequences + (2 * slots if sequences > slots else slots)
    items = torch.empty((capacity, FIELDS.value), dtype=torch.int32, device=seq_lens.device)
    few = 64
    block_b = few if sequences <= few else max(1024, triton.next_power_of_2(sequences))  # few to compile
    _plan_kernel[(sequences,)](
        seq_lens, items, sequences, slots, capacity,
        WINDOW=sliding_window, BLOCK_N=block_n, BLOCK_B=block_b, BLOCK_P=32,
        num_warps=1 if block_b == few else 8,
    )  # fmt: skip
    return items
