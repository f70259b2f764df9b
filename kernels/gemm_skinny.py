"""y = x Wᵀ for a few rows of x: what bounds it is reading W once, at the speed of memory.

A program owns BLOCK_N rows of W (all of K, or one of SPLITS parts of it) and every row of x. W goes through a
software pipeline in shared memory to the tensor cores, which have time to spare: x is padded to 16 rows.
Where N alone gives too few programs, K is split; the last program of a tile to arrive adds up the partial
sums of all, in their order, so that a result never depends on who was last.

Launched so that it overlaps its predecessor (see pdl.py): its first tiles of W are on their way to the L2
cache before x is known.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import pdl
from kernels.pdl import prefetch


@triton.jit
def _weights(p_w, o_n, o_k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    p = p_w + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        return tl.load(p)
    return tl.load(p, mask=(o_n < N)[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def _prefetch_weights(p_w, o_n, lo, N: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """The first LINES cache lines of a program's rows."""
    LINE: tl.constexpr = 1024 // p_w.dtype.element_ty.primitive_bitwidth
    o_k = tl.minimum(lo + tl.arange(0, LINES) * LINE, K - 1)
    prefetch(p_w + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * K + o_k[None, :])


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    p_x, p_w, p_bias, p_y, p_partial, p_arrived, rows, stride_x, stride_y,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, SWIGLU: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_s = tl.program_id(1)
    o_m = tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    lo = i_s * share
    hi = tl.minimum(lo + share, K)
    if PDL:
        gdc_launch_dependents()
        if LINES > 0:
            _prefetch_weights(p_w, o_n, lo, N, K, LINES)
            if SWIGLU:
                _prefetch_weights(p_w + N * K, o_n, lo, N, K, LINES)
        gdc_wait()

    m_m = o_m < rows
    if TRANSPOSED:  # Hopper's tensor cores take 64 rows or more: W's
        b_y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_up = b_y
    for i_k in tl.range(lo, hi, BLOCK_K, num_stages=STAGES):
        o_k = i_k + tl.arange(0, BLOCK_K)
        if TMA:
            b_w = p_w.load([i_n * BLOCK_N, i_k])
            b_x = p_x.load([0, i_k])
        else:
            b_w = _weights(p_w, o_n, o_k, N, K, BLOCK_N, BLOCK_K)
            m_x = m_m[:, None] if K % BLOCK_K == 0 else m_m[:, None] & (o_k < K)[None, :]
            b_x = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=m_x, other=0.0)
        if TRANSPOSED:
            b_y = tl.dot(b_w, tl.trans(b_x), b_y, input_precision=PRECISION)
        else:
            b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PRECISION)
        if SWIGLU:
            if TMA:
                b_u = p_w.load([N + i_n * BLOCK_N, i_k])
            else:
                b_u = _weights(p_w + N * K, o_n, o_k, N, K, BLOCK_N, BLOCK_K)
            if TRANSPOSED:
                b_up = tl.dot(b_u, tl.trans(b_x), b_up, input_precision=PRECISION)
            else:
                b_up = tl.dot(b_x, tl.trans(b_u), b_up, input_precision=PRECISION)
    if SWIGLU:
        b_y = b_y / (1.0 + tl.exp(-b_y)) * b_up
    if TRANSPOSED:
        b_y = tl.trans(b_y)
    m_y = m_m[:, None] & (o_n < N)[None, :]

    if SPLITS > 1:
        p_tile = p_partial + i_n * (SPLITS * BLOCK_M * BLOCK_N)
        p_tile += o_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(p_tile + i_s * (BLOCK_M * BLOCK_N), b_y, mask=m_y)
        tl.debug_barrier()  # all of the tile is stored before this program counts as arrived
        arrived = tl.atomic_add(p_arrived + i_n, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLITS - 1:
            return
        tl.store(p_arrived + i_n, 0)
        b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.static_range(SPLITS):
            b_y += tl.load(p_tile + i * (BLOCK_M * BLOCK_N), mask=m_y, other=0.0, cache_modifier=".cg")
    if BIAS:
        b_y += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    p_out = p_y + o_m[:, None] * stride_y + o_n[None, :]
    if ADD:
        b_y += tl.load(p_out, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def _gemv_kernel(
    p_x, p_w, p_bias, p_norm, p_y, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SWIGLU: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, LINES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        if LINES > 0:
            _prefetch_weights(p_w, o_n, 0, N, K, LINES)
            if SWIGLU:
                _prefetch_weights(p_w + N * K, o_n, 0, N, K, LINES)
        gdc_wait()
    b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_acc_up = b_acc
    b_squares = tl.zeros([BLOCK_K], tl.float32)
    for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        o_k = i_k + tl.arange(0, BLOCK_K)
        b_x = tl.load(p_x + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        if NORM:
            b_squares += b_x * b_x
            b_x *= tl.load(p_norm + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_acc += _weights(p_w, o_n, o_k, N, K, BLOCK_N, BLOCK_K).to(tl.float32) * b_x[None, :]
        if SWIGLU:
            b_acc_up += _weights(p_w + N * K, o_n, o_k, N, K, BLOCK_N, BLOCK_K).to(tl.float32) * b_x[None, :]
    b_y = tl.sum(b_acc, axis=1)
    b_up = tl.sum(b_acc_up, axis=1)
    if NORM:
        factor = tl.rsqrt(tl.sum(b_squares, axis=0) / K + eps)
        b_y *= factor
        b_up *= factor
    if SWIGLU:
        b_y = b_y / (1.0 + tl.exp(-b_y)) * b_up
    if BIAS:
        b_y += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    if ADD:
        b_y += tl.load(p_y + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    tl.store(p_y + o_n, b_y.to(p_y.dtype.element_ty), mask=o_n < N)


class Norm(NamedTuple):
    """RMSNorm of the rows of x, before the product: x weight / rms(x)."""

    weight: Tensor
    eps: float


MAX_ROWS = 64


class Tile(NamedTuple):
    """How a product is cut: see the kernel. `lines` of 128 bytes of every row are fetched ahead."""

    block_n: int
    block_k: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    transposed: bool = False
    lines: int = 0
    tma: bool = False  # loads by the tensor copy engine, `lines` must be 0
    gemv: bool = False  # on the ordinary cores instead, for a single row


# What won on an H200: us, ours / cuBLAS's (with SwiGLU or sum), buffers rotated. At the rest, cuBLAS.
#
#   rows                 1           8          32          64
#   37888x3584       64.6/81.1   66.3/72.4   68.5/80.0   70.9/79.3
#   3584x18944       34.6/39.8   37.1/39.2   38.4/40.6   40.6/42.3
#   4608x3584         9.8/11.5
#   3584x3584         8.5/11.5    9.6/11.6   10.2/11.8
#   152064x3584       242/296     245/288     254/292     264/300
_ROW = Tile(8, 512, stages=3, lines=8, gemv=True)
#   with 128 rows: 295/308 (the vocabulary's, 152064 columns); 37888x3584 86/80
_WIDE = 16384  # output columns from which no split is needed to keep every multiprocessor busy
_WIDEST, _WIDEST_ROWS = 65536, 128


def best_tile(x: Tensor, weight: Tensor, *, swiglu: bool = False, normed: bool = False) -> Tile | None:
    """How to multiply x [T, K] by weight [N, K], or gate and up [2N, K]; None: leave it to cuBLAS.

    `normed`: including the norm of x, which only the product of a single row has registers for.
    """
    rows, (columns, inner) = len(x), weight.shape
    vocabulary = columns >= _WIDEST and not swiglu and inner % 8 == 0
    most = _WIDEST_ROWS if vocabulary else MAX_ROWS
    if not 0 < rows <= most or x.element_size() != 2 or not pdl.supported(x.device):
        return None
    if rows == 1:
        return _ROW
    if normed:
        return None
    if swiglu:
        return Tile(32, 128) if rows <= 16 else Tile(64, 128, transposed=True, tma=inner % 8 == 0)
    if columns >= _WIDE:
        if rows > MAX_ROWS:
            return Tile(256, 64, warps=8, transposed=True, tma=True)
        if rows > 32 and inner % 8 == 0:
            return Tile(128, 64, stages=5, warps=8, transposed=True, tma=True)
        return Tile(64, 128, transposed=True)
    if inner >= 2 * columns or (rows <= 32 and columns == inner):
        return Tile(64, 128, splits=2, stages=6, transposed=True, tma=inner % 8 == 0)
    return None


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Zeroed counters, which every launch leaves at zero; one stream at a time."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def skinny_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    swiglu: bool = False,
    norm: Norm | None = None,
    add: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N], for T up to 64.

    Args:
        x: rows contiguous.
        weight: contiguous.
        bias: or None.
        tile: how to cut it.
        swiglu: the weight is [gate; up] of [2N, K], the result silu(x gateᵀ) * (x upᵀ).
        norm: of x, first; only with a gemv tile.
        add: to what `out` holds.
        out: where the result goes.
    """
    rows, inner = x.shape
    columns = weight.shape[0] // 2 if swiglu else weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    device = x.device
    y = torch.empty((rows, columns), dtype=x.dtype, device=device) if out is None else out
    programs = triton.cdiv(columns, tile.block_n)
    eps, scale = (0.0, None) if norm is None else (norm.eps, norm.weight)
    shared = {
        "N": columns, "K": inner, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.stages,
        "SWIGLU": swiglu, "BIAS": bias is not None, "ADD": add, "LINES": tile.lines,
        "num_warps": tile.warps, **pdl.launch(device),
    }  # fmt: skip
    if tile.gemv:
        _gemv_kernel[(programs,)](x, weight, bias, scale, y, eps, NORM=norm is not None, **shared)
        return y
    block_m, stride_x = max(16, triton.next_power_of_2(rows)), x.stride(0)
    partial = y
    if tile.splits > 1:
        shape = (programs, tile.splits, block_m, tile.block_n)
        partial = torch.empty(shape, dtype=torch.float32, device=device)
    if tile.tma:
        x = TensorDescriptor.from_tensor(x, [block_m, tile.block_k])
        weight = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
    _skinny_kernel[(programs, tile.splits)](
        x, weight, bias, y, partial, _arrivals(device), rows, stride_x, y.stride(0),
        BLOCK_M=block_m, SPLITS=tile.splits, TRANSPOSED=tile.transposed, TMA=tile.tma,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32", **shared,
    )  # fmt: skip
    return y
