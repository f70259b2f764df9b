"""Random inputs for the kernels, and how close a result must be; for the tests on a CPU and on the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.qk_norm import QkNorm

# Absolute and relative: a few roundings to the type, of intermediate values and of the result.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 2e-2),
    torch.float8_e4m3fn: (2**-9, 2**-3),  # a cache's: one step, and nothing is computed in it
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal within the type's tolerance; NaN is never close."""
    atol, rtol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.device), atol=atol, rtol=rtol)


@dataclass
class Paged:
    """A step over a cache whose every slot that no sequence owns is NaN, the null page included."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch


def _slot_matrix(lengths: Sequence[int], page_size: int) -> tuple[Tensor, Tensor, int]:
    """Block tables of randomly placed pages, slots of every sequence's positions, pages in the pool."""
    counts = [-(-n // page_size) for n in lengths]
    pages = (torch.randperm(sum(counts) + 2) + 1).int()
    tables = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
    at = 0
    for i, count in enumerate(counts):
        tables[i, :count] = pages[at : at + count]
        at += count
    positions = torch.arange(tables.shape[1] * page_size)
    slots = tables.long().repeat_interleave(page_size, 1) * page_size + positions % page_size
    return tables, slots, len(pages) + 1


def paged_case(
    lengths: Sequence[int],
    queries: Sequence[int],
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    written: bool = True,
) -> Paged:
    """A step whose sequence i has lengths[i] tokens, of which the last queries[i] are rows.

    A sequence of length 0 with one query is a padding row. With `written` false the whole cache is NaN. The
    cache is of the queries' type unless `cache_dtype` says otherwise.
    """
    torch.manual_seed(seed)
    tables, slots, num_pages = _slot_matrix(lengths, page_size)
    shape = (2, num_pages, kv_heads, page_size, head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
    if written:
        owned = torch.cat([slots[i, :n] for i, n in enumerate(lengths)]).to(device)
        values = torch.randn(2, len(owned), kv_heads, head_dim, device=device).to(dtype)
        cache[:, owned // page_size, :, owned % page_size] = values.transpose(0, 1)
    cache = cache.to(cache_dtype or dtype)
    starts = [0, *accumulate(queries)]
    rows = [torch.arange(n - m, n) for n, m in zip(lengths, queries)]
    row_slots = [
        slots[i, r] if n else torch.zeros(len(r), dtype=torch.int64)
        for i, (n, r) in enumerate(zip(lengths, rows))
    ]
    batch = AttentionBatch(
        positions=torch.cat(rows).clamp(min=0).to(device),
        slots=torch.cat(row_slots).to(device),
        block_tables=tables.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        num_decodes=sum(1 for _ in takewhile(lambda m: m == 1, queries)),
        max_query_len=max(queries),
        max_seq_len=max([*lengths, 1]),
    )
    q = torch.randn(starts[-1], q_heads, head_dim, device=device).to(dtype)
    return Paged(q, cache[0], cache[1], batch)


def fused_qkv(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one random matrix [T, (Hq + 2 Hkv) D]."""
    heads = (q_heads, kv_heads, kv_heads)
    matrix = torch.randn(tokens, sum(heads) * head_dim, device=device).to(dtype)
    q, k, v = matrix.view(tokens, -1, head_dim).split(heads, dim=1)
    return q, k, v


def qk_norm_weights(head_dim: int, dtype: torch.dtype, device: str = "cpu") -> QkNorm:
    """Random weights about 1, different ones for queries and keys."""
    q_weight, k_weight = (1 + 0.3 * torch.randn(2, head_dim, device=device)).to(dtype)
    return QkNorm(q_weight, k_weight, 1e-6)


def cos_sin(max_pos: int, rot_dim: int, device: str = "cpu") -> Tensor:
    """[max_pos, rot_dim] float32: the cosines, then the sines, of theta 10000."""
    frequencies = 10000.0 ** -(torch.arange(0, rot_dim, 2, dtype=torch.float64) / rot_dim)
    angles = torch.outer(torch.arange(max_pos, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)
