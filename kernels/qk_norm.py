"""RMSNorm of each head's query and key, before they are rotated (Qwen3; arXiv:2505.09388).

    y = x / sqrt(mean(x²) + eps) * weight            over the D dimensions of one head

Sums are float32 whatever the type.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import pdl
from kernels.norm import rms_norm_reference
from kernels.pdl import begin

BLOCK_H = 4  # heads a program, and ...
BLOCK_H_MANY = 16  # ... where tokens keep all multiprocessors busy


@triton.jit
def _norm_heads(p_x, p_weight, stride_h, o_h, eps, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    mask = (o_h < HEADS)[:, None] & m_d[None, :]
    p_x += o_h[:, None] * stride_h + o_d[None, :]
    b_w = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / HEAD_DIM + eps)
    tl.store(p_x, (b_x * b_scale[:, None] * b_w[None, :]).to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_kernel(
    p_q, p_k, p_q_weight, p_k_weight, stride_qt, stride_qh, stride_kt, stride_kh, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    if i_h < Q_BLOCKS:
        o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
        _norm_heads(p_q + i_t * stride_qt, p_q_weight, stride_qh, o_h, eps, Q_HEADS, HEAD_DIM, BLOCK_D)
    else:
        o_h = (i_h - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        _norm_heads(p_k + i_t * stride_kt, p_k_weight, stride_kh, o_h, eps, KV_HEADS, HEAD_DIM, BLOCK_D)


def qk_norm_triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`qk_norm` as one Triton kernel, where q and k lie."""
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    if tokens == 0:
        return q, k
    block_h = BLOCK_H if tokens < 512 else BLOCK_H_MANY
    _qk_norm_kernel[(tokens, triton.cdiv(q_heads, block_h) + triton.cdiv(kv_heads, block_h))](
        q, k, q_weight, k_weight, *q.stride()[:2], *k.stride()[:2], eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(dim), num_warps=2, **pdl.launch(q.device),
    )  # fmt: skip
    return q, k


def _qk_norm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys side by side in one matrix, as they come: rotating them takes half the time then."""
    both = torch.cat((q, k), 1).float()
    inverse = torch.linalg.vector_norm(both, 2, 2, True).square_().div_(q.shape[2]).add_(eps).rsqrt_()
    y = both.mul_(inverse)
    heads = (q.shape[1], k.shape[1])
    for part, weight in zip(y.split_with_sizes(heads, 1), (q_weight, k_weight), strict=True):
        part.mul_(weight)
    new_q, new_k = y.to(q.dtype).split_with_sizes(heads, 1)
    return new_q, new_k


def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised queries and keys, of the same shapes and types.

    The memory of q and k may serve for the result; take their contents as lost.

    Args:
        q: [T, Hq, D], any strides; usually a view of a fused qkv matrix, as is k.
        k: [T, Hkv, D].
        q_weight: [D], for all query heads.
        k_weight: [D], for all key heads.
        eps: added to the mean square.
    """
    if q.is_cuda:
        return qk_norm_triton(q, k, q_weight, k_weight, eps)
    return _qk_norm_cpu(q, k, q_weight, k_weight, eps)


def qk_norm_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`qk_norm` a head at a time, in float64 rounded once."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([rms_norm_reference(head, weight, eps) for head in x.unbind(1)], 1)

    return norm(q, q_weight), norm(k, k_weight)
