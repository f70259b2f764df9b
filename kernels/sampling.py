"""One token for each row of logits, without sorting and without the host: a program a row, or, where all take
the likeliest, several.

    w_i = exp((l_i - max l) / temperature)        token = first i with w_0 + ... + w_i > u * total

over the w_i kept: the top_k largest, of those the fewest that hold top_p of the mass, and w_i >= min_p. That
is, all from a threshold on, ties included. It is found by bisection over the logits read as ordered integers.

A first pass leaves the largest logit of every lane (every BLOCK-th token); the 256th of these bounds the
256th of all from below, so a second pass can list the few hundred candidates. Where they hold what is asked
for, as nearly always, the rest works on the list alone; else on the whole row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
CANDIDATES = 1024
ARGMAX_BLOCK = 2048
MOST_PARTS = 16  # of a row, ...
PROGRAMS = 2048  # ... and of all
NO_LOGIT = tl.constexpr(-0x7F800001)  # -inf as an integer in the order of floats
LOG2_E = math.log2(math.e)


@triton.jit
def _ordered(b_x, SHIFT: tl.constexpr):
    """Integers in the order of the floats; without the SHIFT low bits, which narrower types don't use."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _count_and_mass(p_x, length, key, top, scale, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """How many logits are at least the one with this key, and the sum of their weights."""
    b_count = tl.zeros([BLOCK], tl.int32)
    b_mass = tl.zeros([BLOCK], tl.float32)
    for i in range(0, length, BLOCK):
        o_v = i + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_v, mask=o_v < length, other=float("-inf")).to(tl.float32)
        m_in = (_ordered(b_x, SHIFT) >= key) & (o_v < length)
        b_count += m_in.to(tl.int32)
        b_mass += tl.where(m_in, tl.exp2((b_x - top) * scale), 0.0)
    return tl.sum(b_count, axis=0), tl.sum(b_mass, axis=0)


@triton.jit
def _largest_key(p_x, length, lo, hi, top, scale, count, mass, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The largest key from lo to hi that `count` logits, holding `mass`, reach."""
    while lo < hi:
        middle = hi - (hi - lo) // 2
        n, m = _count_and_mass(p_x, length, middle.to(tl.int32), top, scale, BLOCK, SHIFT)
        enough = (n >= count) & (m >= mass)
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle - 1)
    return lo


@triton.jit
def _lane_key(b_key, lo, hi, count):
    """The largest key from lo to hi that `count` of the lanes reach."""
    while lo < hi:
        middle = hi - (hi - lo) // 2
        enough = tl.sum((b_key >= middle.to(tl.int32)).to(tl.int32), axis=0) >= count
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle - 1)
    return lo


@triton.jit
def _draw(p_x, length, key, top, scale, min_p, u, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Place of the kept logit at which the running sum of weights exceeds u of the total."""
    b_total = tl.zeros([BLOCK], tl.float64)
    for i in range(0, length, BLOCK):
        o_v = i + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_v, mask=o_v < length, other=float("-inf")).to(tl.float32)
        b_w = tl.exp2((b_x - top) * scale)
        b_total += tl.where((_ordered(b_x, SHIFT) >= key) & (b_w >= min_p) & (o_v < length), b_w, 0.0)
    target = u * tl.sum(b_total, axis=0)
    before = target * 0.0
    found = length
    last = 0
    for i in range(0, length, BLOCK):
        if found == length:
            o_v = i + tl.arange(0, BLOCK)
            b_x = tl.load(p_x + o_v, mask=o_v < length, other=float("-inf")).to(tl.float32)
            b_w = tl.exp2((b_x - top) * scale)
            m_in = (_ordered(b_x, SHIFT) >= key) & (b_w >= min_p) & (b_w > 0.0) & (o_v < length)
            b_w64 = tl.where(m_in, b_w, 0.0).to(tl.float64)
            last = tl.maximum(last, tl.max(tl.where(m_in, o_v, 0), axis=0))
            after = before + tl.sum(b_w64, axis=0)
            if after > target:
                b_sum = before + tl.cumsum(b_w64, axis=0)
                found = tl.min(tl.where(m_in & (b_sum > target), o_v, length), axis=0)
            before = after
    # Sums in another order may round past the target: then it is the last one kept.
    return tl.where(found < length, found, last)


@triton.jit(do_not_specialize=["stride_x", "limit", "parts"])
def _argmax_kernel(
    p_x, p_token, p_part, p_arrived, stride_x, limit, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """A part of a row: the first of its largest logits, as one number of which the larger is the likelier
    token, and one beyond all stands for a logit that isn't finite. The last part to arrive joins a row's."""
    i_r = tl.program_id(0).to(tl.int64)
    share = tl.cdiv(tl.cdiv(limit, BLOCK), parts) * BLOCK
    lo = tl.program_id(1) * share
    hi = tl.minimum(lo + share, limit)
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    b_at = tl.zeros([BLOCK], tl.int32)
    b_bad = tl.zeros([BLOCK], tl.int32)
    for i in range(lo, hi, BLOCK):
        o_v = i + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + i_r * stride_x + o_v, mask=o_v < hi, other=float("-inf")).to(tl.float32)
        b_bad |= ((b_x != b_x) | (b_x == float("inf"))).to(tl.int32)
        b_at = tl.where(b_x > b_max, o_v, b_at)
        b_max = tl.maximum(b_max, b_x)
    top = tl.max(b_max, axis=0)
    first = tl.min(tl.where(b_max == top, b_at, limit), axis=0)
    best = (_ordered(top, 0).to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    best = tl.where(tl.max(b_bad, axis=0) > 0, 0x7FFFFFFFFFFFFFFF, best)
    p_part += i_r * parts
    tl.store(p_part + tl.program_id(1), best)
    tl.debug_barrier()  # it is stored before this program counts as arrived
    if tl.atomic_add(p_arrived + i_r, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(p_arrived + i_r, 0)
        o_p = tl.arange(0, PARTS)
        b_part = tl.load(p_part + o_p, mask=o_p < parts, other=-(1 << 63), cache_modifier=".cg")
        best = tl.max(b_part, axis=0)
        # -inf, the ordered integer of which this is, and what isn't finite give no token.
        none = (best == 0x7FFFFFFFFFFFFFFF) | ((best >> 32) <= NO_LOGIT)
        tl.store(p_token + i_r, tl.where(none, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF)))


@triton.jit(do_not_specialize=["stride_x", "limit"])
def _sample_kernel(
    p_x, p_params, p_u, p_token, p_listed, p_listed_id, stride_x, limit,
    BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, SHIFT: tl.constexpr, LOG2_E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    p_row = p_x + i_r * stride_x
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    b_at = tl.zeros([BLOCK], tl.int32)
    b_bad = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, limit, BLOCK, num_stages=STAGES):
        o_v = i + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < limit, other=float("-inf")).to(tl.float32)
        b_bad |= ((b_x != b_x) | (b_x == float("inf"))).to(tl.int32)
        b_at = tl.where(b_x > b_max, o_v, b_at)
        b_max = tl.maximum(b_max, b_x)
    top = tl.max(b_max, axis=0)
    token = tl.min(tl.where(b_max == top, b_at, limit), axis=0)
    finite = (tl.max(b_bad, axis=0) == 0) & (top > float("-inf"))
    temperature = tl.load(p_params + i_r * 4)
    if finite & (temperature > 0.0):
        top_p = tl.load(p_params + i_r * 4 + 1)
        min_p = tl.load(p_params + i_r * 4 + 2)
        top_k = tl.load(p_params + i_r * 4 + 3).to(tl.int32)
        if top_k >= limit:
            top_k = 0
        scale = LOG2_E / temperature
        lowest = -(1 << (31 - SHIFT))
        key = tl.full([], lowest, tl.int64)
        listed = 0
        p_list = p_listed + i_r * CANDIDATES
        p_list_id = p_listed_id + i_r * CANDIDATES
        if (top_k > 0) | (top_p < 1.0):
            highest = tl.max(_ordered(b_max, SHIFT), axis=0).to(tl.int64)
            floor = _lane_key(_ordered(b_max, SHIFT), key, highest, tl.maximum(top_k, CANDIDATES // 4))
            count = 0
            b_mass = tl.zeros([BLOCK], tl.float32)
            for i in range(0, limit, BLOCK):
                o_v = i + tl.arange(0, BLOCK)
                b_x = tl.load(p_row + o_v, mask=o_v < limit, other=float("-inf")).to(tl.float32)
                b_mass += tl.exp2((b_x - top) * scale)
                m_in = (_ordered(b_x, SHIFT) >= floor.to(tl.int32)) & (o_v < limit)
                o_list = count + tl.cumsum(m_in.to(tl.int32), axis=0) - 1
                m_list = m_in & (o_list < CANDIDATES)
                tl.store(p_list + o_list, b_x.to(p_list.dtype.element_ty), mask=m_list)
                tl.store(p_list_id + o_list, o_v, mask=m_list)
                count += tl.sum(m_in.to(tl.int32), axis=0)
            tl.debug_barrier()  # the list is read by other threads than those that wrote it
            mass = tl.sum(b_mass, axis=0)
            if count <= CANDIDATES:
                _, listed_mass = _count_and_mass(
                    p_list, count, floor.to(tl.int32), top, scale, CANDIDATES, SHIFT
                )
                if (top_k > 0) | (listed_mass >= top_p * mass):
                    listed = count
            if listed > 0:
                key = floor
                if top_k > 0:
                    key = _largest_key(
                        p_list, listed, floor, highest, top, scale, top_k, 0.0, CANDIDATES, SHIFT
                    )
                    n_all, m_all = _count_and_mass(
                        p_list, listed, key.to(tl.int32), top, scale, CANDIDATES, SHIFT
                    )
                    n_above, m_above = _count_and_mass(
                        p_list, listed, key.to(tl.int32) + 1, top, scale, CANDIDATES, SHIFT
                    )
                    mass = m_above + (top_k - n_above) * (m_all - m_above) / (n_all - n_above)
                if top_p < 1.0:
                    key = _largest_key(
                        p_list, listed, key, highest, top, scale, 0, top_p * mass, CANDIDATES, SHIFT
                    )
            else:
                if top_k > 0:
                    key = _largest_key(p_row, limit, key, highest, top, scale, top_k, 0.0, BLOCK, SHIFT)
                    n_all, m_all = _count_and_mass(p_row, limit, key.to(tl.int32), top, scale, BLOCK, SHIFT)
                    n_above, m_above = _count_and_mass(
                        p_row, limit, key.to(tl.int32) + 1, top, scale, BLOCK, SHIFT
                    )
                    mass = m_above + (top_k - n_above) * (m_all - m_above) / (n_all - n_above)
                if top_p < 1.0:
                    key = _largest_key(p_row, limit, key, highest, top, scale, 0, top_p * mass, BLOCK, SHIFT)
        u = tl.load(p_u + i_r)
        if listed > 0:
            place = _draw(p_list, listed, key.to(tl.int32), top, scale, min_p, u, CANDIDATES, SHIFT)
            token = tl.load(p_list_id + place)
        else:
            token = _draw(p_row, limit, key.to(tl.int32), top, scale, min_p, u, BLOCK, SHIFT)
    tl.store(p_token + i_r, tl.where(finite, token, -1).to(tl.int64))


def sample_triton(
    logits: Tensor, limit: int, params: Tensor | None = None, u: Tensor | None = None
) -> Tensor:
    """A token [R] int64 for each row of logits [R, V], ids below `limit` only; -1 where not all are finite.

    Args:
        logits: any floating type, last dimension contiguous. -inf excludes a token.
        limit: ids from here on are padding.
        params: [R, 4] float32: temperature (0: the likeliest, the first of equals), top_p (1: all), min_p (0:
            all), top_k (0: all). None: the likeliest for every row.
        u: [R] float64 in [0, 1): the draws.
    """
    if params is None or u is None:
        return _argmax(logits, limit)
    rows = len(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    listed = logits.new_empty(rows * CANDIDATES)
    ids = torch.empty(listed.numel(), dtype=torch.int32, device=logits.device)
    _sample_kernel[(rows,)](
        logits, params, u, tokens, listed, ids, logits.stride(0), limit,
        BLOCK=BLOCK, CANDIDATES=CANDIDATES, SHIFT=16 if logits.dtype == torch.bfloat16 else 0, LOG2_E=LOG2_E,
        STAGES=4, num_warps=8,
    )  # fmt: skip
    return tokens


@functools.cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """Zeroed counters, which every launch leaves at zero; one stream at a time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _argmax(logits: Tensor, limit: int) -> Tensor:
    rows, device = len(logits), logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    parts = min(MOST_PARTS, max(1, PROGRAMS // max(rows, 1)))
    best = torch.empty((rows, parts), dtype=torch.int64, device=device)
    _argmax_kernel[(rows, parts)](
        logits, tokens, best, _arrivals(device, triton.next_power_of_2(rows)), logits.stride(0), limit, parts,
        BLOCK=ARGMAX_BLOCK, PARTS=MOST_PARTS, num_warps=4,
    )  # fmt: skip
    return tokens
