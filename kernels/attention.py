"""Attention of a step over the paged KV cache: decodes by one kernel, chunks of prompts by another."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_cpu import paged_attention_cpu
from kernels.attention_decode import Rope, decode_attention_triton
from kernels.attention_dense import dense_attention, dense_is_faster
from kernels.attention_prefill import prefill_attention_triton
from kernels.batch import AttentionBatch
from kernels.qk_norm import QkNorm
from kernels.rope_cache import rope_and_cache


def paged_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, sliding_window: int = 0
) -> Tensor:
    """`paged_attention` through the Triton kernels."""
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.num_decodes:
        decode_attention_triton(q, k_cache, v_cache, batch, scale, sliding_window, out)
    if batch.num_decodes < batch.seq_lens.shape[0]:
        prefill = dense_attention if dense_is_faster(q, k_cache, batch) else prefill_attention_triton
        prefill(q, k_cache, v_cache, batch, scale, sliding_window, out)
    return out


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, sliding_window: int = 0
) -> Tensor:
    """Causal grouped-query attention of the step's tokens over their sequences' cached keys and values.

    The step's own keys and values must be in the cache already. Only slots that a sequence owns are read, up
    to its length: what unwritten slots and the null page hold (NaN included) doesn't matter.

    Args:
        q: [T, Hq, D] rotated queries, Hq a multiple of Hkv.
        k_cache: [N, Hkv, P, D], any number of pages (offsets are 64-bit); of q's type or another
            (cache_types.py).
        v_cache: [N, Hkv, P, D], of the same strides.
        batch: whose rows they are. A decode row of length 0 gives zeros; rows of no sequence are undefined.
        scale: factor of the scores, before the softmax.
        sliding_window: how many tokens a query sees, itself included; 0: all before it.

    Returns:
        [T, Hq, D], contiguous.
    """
    if q.is_cuda:
        return paged_attention_triton(q, k_cache, v_cache, batch, scale, sliding_window)
    return paged_attention_cpu(q, k_cache, v_cache, batch, scale, sliding_window)


def rope_and_decode_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    sliding_window: int = 0,
    norm: QkNorm | None = None,
) -> Tensor:
    """`rope_and_attention` of a step in which every row decodes, in the attention kernel itself."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rope = Rope(k, v, cos_sin, norm)
    decode_attention_triton(q, k_cache, v_cache, batch, scale, sliding_window, out, rope)
    return out


def rope_and_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    sliding_window: int = 0,
    norm: QkNorm | None = None,
) -> Tensor:
    """`rope_and_cache`, then `paged_attention` of the rotated queries; arguments as theirs."""
    if q.is_cuda and batch.decode_only:
        return rope_and_decode_triton(q, k, v, cos_sin, batch, k_cache, v_cache, scale, sliding_window, norm)
    q = rope_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache, norm)
    return paged_attention(q, k_cache, v_cache, batch, scale, sliding_window)


def paged_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, sliding_window: int = 0
) -> Tensor:
    """`paged_attention`, a sequence at a time, in float64 rounded once; rows of no sequence are 0."""
    out = torch.zeros_like(q)
    page_size = k_cache.shape[2]
    group = q.shape[1] // k_cache.shape[1]
    starts = batch.query_starts.tolist()
    for i, length in enumerate(batch.seq_lens.tolist()):
        if length == 0:
            continue
        rows = slice(starts[i], starts[i + 1])
        positions = torch.arange(length, device=q.device)
        pages, offsets = batch.block_tables[i].long()[positions // page_size], positions % page_size
        keys, values = (
            cache.view(torch.uint8)[pages, :, offsets].view(cache.dtype).double().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )  # [S, Hq, D]; as bytes, since torch indexes FP8 on some devices only
        distance = positions[length - (rows.stop - rows.start) :, None] - positions
        visible = (distance >= 0) & (distance < (sliding_window or length))
        scores = torch.einsum("nhd,shd->hns", q[rows].double(), keys) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=2)
        out[rows] = torch.einsum("hns,shd->nhd", weights, values).to(q.dtype)
    return out
