"""RMSNorm, alone and fused with the residual add before it.

    y = x / sqrt(mean(x²) + eps) * weight            (Zhang & Sennrich 2019, arXiv:1910.07467)

Sums are float32 whatever the input type; the fused form normalises the residual as it is stored, that is
after rounding to its type, so fused and separate agree bit for bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import pdl
from kernels.cpu import LANES, PARALLEL_ROWS, compiled
from kernels.pdl import begin


@triton.jit
def _rms_norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    stride_x,
    stride_part,
    stride_residual,
    stride_out,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < HIDDEN
    b_w = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)
    begin(PDL)
    p_x += i_t * stride_x + o_h
    b_x = tl.load(p_x, mask=m_h, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        b_x += tl.load(p_x + i * stride_part, mask=m_h, other=0.0).to(tl.float32)
    if ADD:
        p_r = p_residual + i_t * stride_residual + o_h
        b_sum = (b_x + tl.load(p_r, mask=m_h, other=0.0).to(tl.float32)).to(p_residual.dtype.element_ty)
        tl.store(p_r, b_sum, mask=m_h)
        b_x = b_sum.to(tl.float32)
    b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / HIDDEN + eps)
    b_y = b_x * b_scale * b_w
    tl.store(p_out + i_t * stride_out + o_h, b_y.to(p_out.dtype.element_ty), mask=m_h)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    parts = x.unsqueeze(0) if x.dim() == 2 else x
    count, tokens, hidden = parts.shape
    parts = parts if parts.stride(2) == 1 else parts.contiguous()
    dtype = x.dtype if residual is None else residual.dtype
    out = torch.empty((tokens, hidden), dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        parts,
        residual,
        weight,
        out,
        parts.stride(1),
        parts.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        PARTS=count,
        ADD=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
        **pdl.launch(x.device),
    )
    return out


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` as one Triton kernel, a row a program."""
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` as one Triton kernel, a row a program."""
    if residual.stride(1) != 1:
        raise ValueError(
            f"residual must have contiguous rows to be updated in place, not strides {residual.stride()}"
        )
    return _launch(x, residual, weight, eps), residual


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[1],), weight, eps)
    kernels = compiled()
    if kernels is not None and x.shape[1] % LANES == 0 and x.stride(1) == 1:
        rows, hidden = x.shape
        y = torch.empty((rows, hidden))
        threads = torch.get_num_threads() if rows >= PARALLEL_ROWS else 1
        kernels.rms_norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), rows, hidden, eps, threads
        )
        return y
    # F.rms_norm is a chain of eight operations; these five take half its time on a few rows.
    norm = torch.linalg.vector_norm(x, 2, 1, True)
    inverse = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[1]).rsqrt_()
    return (x * inverse).mul_(weight)


@lru_cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows of x [T, H], scaled by weight [H]; same type as x, contiguous."""
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps)
    return _rms_norm_cpu(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x in place, then its normalised rows: (normed [T, H], residual [T, H]).

    x is [T, H], or [S, T, H]: S parts of it, which are added up before anything is rounded.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    residual.add_(x if x.dim() == 2 else x.sum(0))
    return _rms_norm_cpu(residual, weight, eps), residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` term by term in float64, rounded once."""
    exact = x.double()
    rms = (exact.square().mean(dim=1, keepdim=True) + eps).sqrt()
    return (exact / rms * weight.double()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` term by term; residual is updated in place."""
    residual.copy_(residual.float() + (x.float() if x.dim() == 2 else x.float().sum(0)))
    return rms_norm_reference(residual, weight, eps), residual
