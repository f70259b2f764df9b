"""The paged cache as a matrix of head vectors: what torch's gather and scatter work on."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(cache: Tensor) -> Tensor:
    """View of a cache [N, Hkv, P, D] as [R, D]: `row_ids` says which row a slot's head is.

    The cache may be strided (one layer of a larger pool) as long as head vectors are contiguous and start at
    multiples of D elements.
    """
    # Kept with the tensor: making a view takes as long as the smaller operations on it do.
    rows: Tensor | None = getattr(cache, "_pagefleet_rows", None)
    if rows is None:
        rows = cache._pagefleet_rows = _make_rows(cache)  # type: ignore[attr-defined]
    return rows


def _make_rows(cache: Tensor) -> Tensor:
    pages, heads, page_size, dim = cache.shape
    page, head, slot, element = cache.stride()
    if element != 1 or page % dim or head % dim or slot % dim:
        raise ValueError(
            f"cache strides {cache.stride()}: the last must be 1, the others multiples of head_dim {dim}"
        )
    last = (pages - 1) * page + (heads - 1) * head + (page_size - 1) * slot
    return cache.as_strided((last // dim + 1, dim), (dim, 1))


def row_ids(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of `as_rows(cache)` that hold each KV head of each slot: slots [...] int64 -> [..., Hkv] int64."""
    _, heads, page_size, dim = cache.shape
    page, head, offset = (stride // dim for stride in cache.stride()[:3])
    first = slots // page_size * page + slots % page_size * offset
    return first.unsqueeze(-1) + torch.arange(heads, device=slots.device) * head
