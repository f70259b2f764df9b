"""Rotary embedding of queries and keys, fused with the write of keys and values into the paged cache.

For a pair (x1, x2) = (x[i], x[i + R/2]), i < R/2, of a head vector at position p, with angle θ = p·f_i:

    x1' = x1·cos θ − x2·sin θ      x2' = x2·cos θ + x1·sin θ      (RoFormer, arXiv:2104.09864; NeoX's halves)

Dimensions from R on are left as they are. Angles come as a float32 table, and the rotation is float32. With a
norm of queries and keys (qk_norm.py) it is of the normalised vectors, rounded once, behind the rotation.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import pdl
from kernels.batch import AttentionBatch
from kernels.cache_rows import as_rows, row_ids
from kernels.cache_types import as_cached, as_cached_torch
from kernels.cpu import LANES, PARALLEL_ROWS, compiled
from kernels.pdl import begin
from kernels.qk_norm import QkNorm, qk_norm, qk_norm_reference

BLOCK_H = 4  # heads a program: few enough that one token still spreads over several multiprocessors ...
BLOCK_H_MANY = 16  # ... and many where tokens keep all of them busy


@triton.jit
def angles(p_row, o_d, HALF: tl.constexpr):
    """Factors of each place of a head vector, and of its pair, from the table's row of a position."""
    p_angle = p_row + tl.where(o_d < HALF, o_d, o_d - HALF)
    b_cos = tl.load(p_angle, mask=o_d < 2 * HALF, other=1.0)
    b_sin = tl.load(p_angle + HALF, mask=o_d < 2 * HALF, other=0.0)
    return b_cos, tl.where(o_d < HALF, -b_sin, b_sin)


@triton.jit
def rotated(
    p_x, p_weight, mask, o_d, b_cos, b_sin, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of a head vector at p_x, or of SEVERAL (rows), normalised first with NORM, rounded to
    their type; cosines and sines of all D places by `angles`."""
    m_pair = o_d < 2 * HALF
    o_pair = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)
    b_x = tl.load(p_x + o_d, mask=mask, other=0.0).to(tl.float32)
    b_pair = tl.load(p_x + o_pair, mask=mask & m_pair, other=0.0).to(tl.float32)
    if NORM:
        if SEVERAL:
            b_squares = tl.sum(b_x * b_x, axis=1)[:, None]
        else:
            b_squares = tl.sum(b_x * b_x, axis=0)
        b_scale = 1.0 / tl.sqrt(b_squares / HEAD_DIM + eps)
        b_x *= b_scale * tl.load(p_weight + o_d, mask=o_d < HEAD_DIM, other=0.0).to(tl.float32)
        b_pair *= b_scale * tl.load(p_weight + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    return (b_x * b_cos + b_pair * b_sin).to(p_x.dtype.element_ty)


@triton.jit
def _rotate(
    p_in, p_out, p_weight, p_row, m_h, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Head vectors from p_in to p_out, normalised first with NORM. COPY: not the same place, so that what
    isn't rotated has to go there, too."""
    PARTIAL: tl.constexpr = 2 * HALF < HEAD_DIM
    o_r = tl.arange(0, BLOCK_R)[None, :]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_r = o_r < HALF
    rounded = p_in.dtype.element_ty
    dtype = p_out.dtype.element_ty
    if NORM and PARTIAL:
        # As one tensor: with the rotated part and the rest as two, Triton 3.6 loses the scale of a head on
        # its way from the threads of one to those of the other.
        m_d = m_h & (o_d < HEAD_DIM)
        b_cos, b_sin = angles(p_row, o_d, HALF)
        b_x = rotated(p_in, p_weight, m_d, o_d, b_cos, b_sin, eps, HEAD_DIM, HALF, NORM, True)
        tl.debug_barrier()  # a pair's other half is another thread's to write, in the same place maybe
        tl.store(p_out + o_d, as_cached(b_x, dtype), mask=m_d)
    else:
        b_cos = tl.load(p_row + o_r, mask=m_r, other=0.0)
        b_sin = tl.load(p_row + HALF + o_r, mask=m_r, other=0.0)
        b_1 = tl.load(p_in + o_r, mask=m_h & m_r, other=0.0).to(tl.float32)
        b_2 = tl.load(p_in + HALF + o_r, mask=m_h & m_r, other=0.0).to(tl.float32)
        if NORM:
            b_squares = tl.sum(b_1 * b_1 + b_2 * b_2, axis=1)
            b_scale = (1.0 / tl.sqrt(b_squares / HEAD_DIM + eps))[:, None]
            b_1 *= b_scale * tl.load(p_weight + o_r, mask=m_r, other=0.0).to(tl.float32)
            b_2 *= b_scale * tl.load(p_weight + HALF + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_first, b_second = b_1 * b_cos - b_2 * b_sin, b_2 * b_cos + b_1 * b_sin
        tl.store(p_out + o_r, as_cached(b_first.to(rounded), dtype), mask=m_h & m_r)
        tl.store(p_out + HALF + o_r, as_cached(b_second.to(rounded), dtype), mask=m_h & m_r)
        if PARTIAL and COPY:
            m_rest = m_h & (o_d >= 2 * HALF) & (o_d < HEAD_DIM)
            b_rest = tl.load(p_in + o_d, mask=m_rest, other=0.0)
            tl.store(p_out + o_d, as_cached(b_rest, dtype), mask=m_rest)


@triton.jit
def _rope_cache_kernel(
    p_q, p_k, p_v, p_cos_sin, p_positions, p_slots, p_k_cache, p_v_cache, p_q_weight, p_k_weight, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cs,
    stride_kn, stride_knh, stride_kp, stride_vn, stride_vnh, stride_vp,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    p_row = p_cos_sin + tl.load(p_positions + i_t) * stride_cs
    if i_h < Q_BLOCKS:
        o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
        p_head = p_q + i_t * stride_qt + o_h[:, None] * stride_qh
        m_h = (o_h < Q_HEADS)[:, None]
        _rotate(p_head, p_head, p_q_weight, p_row, m_h, eps, HEAD_DIM, HALF, BLOCK_R, BLOCK_D, NORM, False)
    else:
        o_h = (i_h - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        slot = tl.load(p_slots + i_t)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        m_h = (o_h < tl.where(page > 0, KV_HEADS, 0))[:, None]  # none in the null page
        p_key = p_k + i_t * stride_kt + o_h[:, None] * stride_kh
        p_cached = p_k_cache + page * stride_kn + o_h[:, None] * stride_knh + offset * stride_kp
        _rotate(p_key, p_cached, p_k_weight, p_row, m_h, eps, HEAD_DIM, HALF, BLOCK_R, BLOCK_D, NORM, True)
        o_d = tl.arange(0, BLOCK_D)[None, :]
        m_d = m_h & (o_d < HEAD_DIM)
        b_v = tl.load(p_v + i_t * stride_vt + o_h[:, None] * stride_vh + o_d, mask=m_d, other=0.0)
        p_value = p_v_cache + page * stride_vn + o_h[:, None] * stride_vnh + offset * stride_vp
        tl.store(p_value + o_d, as_cached(b_v, p_v_cache.dtype.element_ty), mask=m_d)


def rope_and_cache_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    norm: QkNorm | None = None,
) -> Tensor:
    """`rope_and_cache` as one Triton kernel; q is rotated where it lies."""
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    half = cos_sin.shape[1] // 2
    if tokens == 0:
        return q
    block_h = BLOCK_H if tokens < 512 else BLOCK_H_MANY
    grid = (tokens, triton.cdiv(q_heads, block_h) + triton.cdiv(kv_heads, block_h))
    _rope_cache_kernel[grid](
        q, k, v, cos_sin, batch.positions, batch.slots, k_cache, v_cache, *(norm or QkNorm(q, q, 0.0)),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos_sin.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, HALF=half, PAGE_SIZE=k_cache.shape[2],
        BLOCK_H=block_h, BLOCK_R=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(dim),
        NORM=norm is not None, num_warps=2 if tokens < 512 else 4, **pdl.launch(q.device),
    )  # fmt: skip
    return q


class _Angles(NamedTuple):
    cos: Tensor  # [T, 1, R]: both halves the same
    sin: Tensor  # [T, 1, R/2]


class _Writes(NamedTuple):
    rows: Tensor  # [W, Hkv]: where the written tokens' heads go
    tokens: Tensor | None  # [W]: which tokens those are; None: all


def _angles(cos_sin: Tensor, batch: AttentionBatch) -> _Angles:
    key = ("rope", cos_sin.data_ptr())
    angles: _Angles | None = batch.plans.get(key)
    if angles is None:
        cos, sin = cos_sin.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=2)
        angles = batch.plans[key] = _Angles(torch.cat((cos, cos), 2), sin)
    return angles


def _writes(batch: AttentionBatch, cache: Tensor) -> _Writes:
    key = ("writes", cache.stride())
    writes: _Writes | None = batch.plans.get(key)
    if writes is None:
        real = batch.slots >= cache.shape[2]
        tokens = None if bool(real.all()) else real.nonzero().squeeze(1)
        slots = batch.slots if tokens is None else batch.slots[tokens]
        writes = batch.plans[key] = _Writes(row_ids(cache, slots), tokens)
    return writes


def _side_by_side(a: Tensor, b: Tensor) -> Tensor | None:
    """a [T, H1, D] and b [T, H2, D] as one view [T, H1 + H2, D] if they are neighbours in a fused matrix."""
    tokens, heads, dim = a.shape
    strides = a.stride()
    if b.data_ptr() != a.data_ptr() + heads * strides[1] * a.element_size() or b.stride() != strides:
        return None
    return a.as_strided((tokens, heads + b.shape[1], dim), strides)


def _rotate_heads(x: Tensor, angles: _Angles) -> Tensor:
    """x [T, H, D] rotated, in x's type."""
    rot_dim = angles.cos.shape[2]
    if rot_dim < x.shape[2]:
        turned, rest = x.split_with_sizes((rot_dim, x.shape[2] - rot_dim), 2)
        return torch.cat((_rotate_heads(turned, angles), rest), 2)
    x32 = x.float()
    x1, x2 = x32.chunk(2, 2)
    y = x32 * angles.cos
    y1, y2 = y.chunk(2, 2)
    y1.addcmul_(x2, angles.sin, value=-1)
    y2.addcmul_(x1, angles.sin)
    return y.to(x.dtype)


def _fits_kernel(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether cpu_rope.py's kernel takes these types, sizes and strides."""
    return (
        all(one.dtype == torch.float32 for one in (q, k, v, cos_sin, k_cache, v_cache))
        and q.shape[2] % LANES == cos_sin.shape[1] % (2 * LANES) == 0
        and q.stride() == k.stride()
        and q.stride(2) == v.stride(2) == k_cache.stride(3) == 1
        and k_cache.stride() == v_cache.stride()
    )


def _rope_and_cache_cpu(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, batch: AttentionBatch, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    kernels = compiled()
    if kernels is not None and _fits_kernel(q, k, v, cos_sin, k_cache, v_cache):
        threads = torch.get_num_threads() if len(q) >= PARALLEL_ROWS else 1
        kernels.rope_and_cache(
            q.data_ptr(), k.data_ptr(), *q.stride()[:2], v.data_ptr(), *v.stride()[:2], cos_sin.data_ptr(),
            batch.positions.data_ptr(), batch.slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            *k_cache.stride()[:3], k_cache.shape[2], *q.shape[:2], k.shape[1], q.shape[2], cos_sin.shape[1],
            threads,
        )  # fmt: skip
        return q
    angles = _angles(cos_sin, batch)
    fused = _side_by_side(q, k)
    if fused is None:
        q, k = _rotate_heads(q, angles), _rotate_heads(k, angles)
    else:
        q, k = _rotate_heads(fused, angles).split_with_sizes((q.shape[1], k.shape[1]), 1)
    rows, tokens = _writes(batch, k_cache)
    if tokens is not None:
        k, v = k[tokens], v[tokens]
    as_rows(k_cache)[rows] = as_cached_torch(k, k_cache.dtype)
    as_rows(v_cache)[rows] = as_cached_torch(v, v_cache.dtype)
    return q


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    norm: QkNorm | None = None,
) -> Tensor:
    """Rotate q and k at batch.positions, write k and v to the cache at batch.slots, hand back the rotated q.

    q's own memory may serve for the result; take its contents as lost. Tokens whose slot lies in the null
    page (slot < page_size) are rotated but not written.

    Args:
        q: [T, Hq, D], any strides; usually a view of a fused qkv matrix, as are k and v.
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        cos_sin: [max_pos, R] float32, R <= D: cosines of position p's R/2 angles, then their sines, in row p.
        batch: positions and slots of the T tokens.
        k_cache: [N, Hkv, P, D], of k's type or another (cache_types.py).
        v_cache: [N, Hkv, P, D], of the same strides.
        norm: of queries and keys, before they are rotated.

    Returns:
        Rotated q [T, Hq, D].
    """
    if q.is_cuda:
        return rope_and_cache_triton(q, k, v, cos_sin, batch, k_cache, v_cache, norm)
    if norm is not None:
        q, k = qk_norm(q, k, norm)
    return _rope_and_cache_cpu(q, k, v, cos_sin, batch, k_cache, v_cache)


def rope_and_cache_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    norm: QkNorm | None = None,
) -> Tensor:
    """`rope_and_cache`, a token at a time, in float64 rounded once."""
    half = cos_sin.shape[1] // 2
    page_size = k_cache.shape[2]
    dtype, k_dtype = q.dtype, k.dtype
    if norm is not None:
        q, k = qk_norm_reference(q.double(), k.double(), norm)
    cos, sin = cos_sin.double()[batch.positions].split(half, dim=1)

    def rotate(x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.double().clone()
        x1, x2 = x[:, :, :half].double(), x[:, :, half : 2 * half].double()
        y[:, :, :half] = x1 * cos[:, None] - x2 * sin[:, None]
        y[:, :, half : 2 * half] = x2 * cos[:, None] + x1 * sin[:, None]
        return y.to(dtype)

    rotated_k = rotate(k, k_dtype)
    for t, slot in enumerate(batch.slots.tolist()):
        if slot >= page_size:
            k_cache[slot // page_size, :, slot % page_size] = as_cached_torch(rotated_k[t], k_cache.dtype)
            v_cache[slot // page_size, :, slot % page_size] = as_cached_torch(v[t], v_cache.dtype)
    return rotate(q, dtype)
