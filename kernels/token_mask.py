"""Logits of tokens that a mask leaves out become -inf: one bit a token, for some of the rows.

logits[places[g], v] = -inf    where bit v % 32 of mask[g, v // 32] is 0, or there is no such word
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize=["stride_x", "vocab", "words"])
def _mask_kernel(p_x, p_mask, p_place, stride_x, vocab, words, BLOCK: tl.constexpr):
    i_g = tl.program_id(0).to(tl.int64)
    i_r = tl.load(p_place + i_g).to(tl.int64)
    o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_w = o_v // 32
    b_word = tl.load(p_mask + i_g * words + o_w, mask=o_w < words, other=0)
    m_out = ((b_word >> (o_v % 32)) & 1) == 0
    b_x = tl.full([BLOCK], float("-inf"), tl.float32).to(p_x.dtype.element_ty)
    tl.store(p_x + i_r * stride_x + o_v, b_x, mask=m_out & (o_v < vocab))


def mask_tokens(logits: Tensor, mask: Tensor, places: Tensor) -> None:
    """Mask rows of `logits`, in place.

    Args:
        logits: [R, V] of any floating type, last dimension contiguous.
        mask: [G, W] int32, contiguous; bit b of word w is token 32 w + b.
        places: [G] int32, the row of the logits that each mask is for; each row once.
    """
    (mask_tokens_triton if logits.is_cuda else mask_tokens_torch)(logits, mask, places)


def mask_tokens_triton(logits: Tensor, mask: Tensor, places: Tensor) -> None:
    """See `mask_tokens`. Writes only what is masked; reads no logits."""
    vocab = logits.shape[1]
    grid = (len(places), triton.cdiv(vocab, BLOCK))
    _mask_kernel[grid](logits, mask, places, logits.stride(0), vocab, mask.shape[1], BLOCK=BLOCK, num_warps=4)


def mask_tokens_torch(logits: Tensor, mask: Tensor, places: Tensor) -> None:
    """See `mask_tokens`; for tensors on the host."""
    rows, vocab = logits.shape
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")  # pads with 0
    masked = torch.from_numpy(bits).view(torch.bool).logical_not_()
    if len(places) == rows and torch.equal(places, torch.arange(rows, dtype=torch.int32)):
        logits.masked_fill_(masked, -torch.inf)
    else:
        index = places.long()
        logits[index] = logits[index].masked_fill_(masked, -torch.inf)
