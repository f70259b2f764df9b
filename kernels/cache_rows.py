"""The paged cache as a matrix of head vectors: what torch's gather and scatter work on."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(cache: Tensor) -> Tensor:
    """View of a cache [N, Hkv, P, D] as [R, D]: `row_ids` says which row a slot's head is.

    The cache may be strided (one layer of a larger pool) as long as head vectors are contiguous and start at
    multiples of D elements.
    """
    dim = cache.shape[3]
    if cache.is_contiguous():
        return cache.view(-1, dim)
    strides = cache.stride()
    if strides[3] != 1 or any(stride % dim for stride in strides[:3]):
        raise ValueError(
            f"cache strides {strides}: the last must be 1, the others multiples of head_dim {dim}"
        )
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], strides[:3]))
    return cache.as_strided((last // dim + 1, dim), (dim, 1))


def row_ids(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of `as_rows(cache)` that hold each KV head of each slot: slots [...] int64 -> [..., Hkv] int64."""
    _, heads, page_size, dim = cache.shape
    page, head, offset = (stride // dim for stride in cache.stride()[:3])
    first = slots // page_size * page + slots % page_size * offset
    return first.unsqueeze(-1) + torch.arange(heads, device=slots.device) * head
