"""Paged attention on a CPU: torch operations only, everything derived from the batch once a step.

Keys are gathered by row (a KV head of a slot) into a dense block a group of sequences, scored by one batched
GEMM; values are never copied: `embedding_bag` sums them where they lie, weighted by the softmax. A sequence
shorter than its group repeats its own last token behind it, with a score of −inf: what is read is always
something it wrote, so memory never written, whatever it holds, can't reach a result.

Pages of another type than the queries' (FP8, 16 bits) are copied to theirs, and the copies attended to:
memory that grows with the step's contexts, and not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.cache_rows import as_rows, row_ids
from kernels.cpu import LANES, TASK_ROWS, compiled

GROUP_COST = 250  # what one more group costs, in tokens of padding it would have to save (two threads, Zen 3)
# And how many tokens of keys, padding included, stay in the cache between gather and GEMM.
GROUP_TOKENS = 4096
SUM = 0  # embedding_bag's mode
# Tokens of a prompt that are computed as if each decoded: gathering their context takes longer.
FEW = TASK_ROWS


class _DecodeGroup(NamedTuple):
    rows: Tensor | None  # [b] rows of q; None: all, in order
    keys: Tensor  # [b * Hkv * S] cache rows
    bias: Tensor  # [b * Hkv, 1, S]: 0, or -inf behind a sequence's end
    values: Tensor  # [b * Hq * S] cache rows, a bag of S for each query head
    bags: Tensor  # [b * Hq] where each bag starts


class _Chunk(NamedTuple):
    start: int
    end: int
    keys: Tensor  # [Hkv * S] cache rows of the keys, and of the values, that any row of the chunk sees
    mask: Tensor | None  # [n, S] 0 or -inf; None: plain causal, n == S


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences that decode together, so that padding plus GROUP_COST a group is least.

    Groups are runs of the descending lengths: dynamic programming over where to cut. Empty sequences are left
    out.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__, reverse=True)
    cost = [0] + [0] * len(order)
    cut = [0] * len(cost)
    for end in range(1, len(cost)):
        options: list[tuple[int, int]] = []
        for start in range(end - 1, -1, -1):
            padded = lengths[order[start]] * (end - start)
            if padded > GROUP_TOKENS and options:
                break
            options.append((cost[start] + GROUP_COST + padded, start))
        cost[end], cut[end] = min(options)
    groups = []
    end = len(order)
    while end:
        groups.append(sorted(order[cut[end] : end]))
        end = cut[end]
    return groups


def _visible_slots(batch: AttentionBatch, sequences: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots of positions [b, S] of the sequences [b]."""
    tables = batch.block_tables[sequences].long()
    return tables.gather(1, positions // page_size) * page_size + positions % page_size


class _Few(NamedTuple):
    start: int
    end: int
    table: Tensor  # [1, pages] the sequence's own
    lengths: Tensor  # [n] int32: tokens that each row sees, before a window is cut off


def _plan_group(
    batch: AttentionBatch, members: list[int], cache: Tensor, q_heads: int, window: int, dtype: torch.dtype
) -> _DecodeGroup:
    sequences = torch.tensor(members)
    lengths = batch.seq_lens[sequences].long()
    first = (lengths - window).clamp_(min=0) if window else torch.zeros_like(lengths)
    longest = int((lengths - first).max())
    wanted = first[:, None] + torch.arange(longest)
    last = lengths[:, None] - 1
    slots = _visible_slots(batch, sequences, wanted.minimum(last), cache.shape[2])
    rows = row_ids(cache, slots).movedim(-1, 1)  # [b, Hkv, S]
    count, kv_heads, _ = rows.shape
    bias = torch.zeros(count, longest, dtype=dtype).masked_fill_(wanted > last, float("-inf"))
    return _DecodeGroup(
        rows=None if count == batch.num_decodes else sequences,
        keys=rows.reshape(-1),
        bias=bias.repeat_interleave(kv_heads, 0).unsqueeze(1),
        values=rows.repeat_interleave(q_heads // kv_heads, 1).view(-1),
        bags=torch.arange(0, count * q_heads * longest, longest),
    )


def _plan_decode(
    batch: AttentionBatch, cache: Tensor, q_heads: int, window: int, dtype: torch.dtype
) -> list[_DecodeGroup]:
    lengths = batch.seq_lens[: batch.num_decodes]
    seen = lengths.clamp(max=window) if window else lengths
    return [
        _plan_group(batch, members, cache, q_heads, window, dtype)
        for members in group_by_length(seen.tolist())
    ]


def _decode_group(group: _DecodeGroup, q: Tensor, k_rows: Tensor, v_rows: Tensor, scale: float) -> Tensor:
    """q [b, Hq, D] -> [b * Hq, D]."""
    batches, _, longest = group.bias.shape
    dim = q.shape[2]
    keys = k_rows.index_select(0, group.keys).view(batches, longest, dim)
    scores = torch.baddbmm(group.bias, q.reshape(batches, -1, dim), keys.mT, alpha=scale)
    # Not F.embedding_bag: its checks in Python take longer than the sum over a short context.
    return torch.embedding_bag(
        v_rows, group.values, group.bags, False, SUM, False, scores.softmax(2).view(-1)
    )[0]


def _fits_kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether cpu_decode.py's kernel takes these types, sizes and strides."""
    return (
        q.dtype == k_cache.dtype == v_cache.dtype == torch.float32
        and q.shape[2] % LANES == 0
        and q.stride(2) == k_cache.stride(3) == 1
        and k_cache.stride() == v_cache.stride()
    )


def _decode_compiled(
    kernel: Callable[..., None],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    task_rows: int = 1,
) -> Tensor:
    """A sequence a row: `tables` [B, pages], which may be one row repeated, and `lengths` [B]. `task_rows`:
    so many of the same sequence, of lengths that ascend, are computed together."""
    rows, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    out = torch.empty((rows, heads, dim))
    threads = min(torch.get_num_threads(), -(-rows // task_rows) * kv_heads)
    kernel(
        q.data_ptr(), *q.stride()[:2], k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.stride()[:3],
        page_size, tables.data_ptr(), tables.stride(0), lengths.data_ptr(), out.data_ptr(), rows,
        task_rows, kv_heads, window, scale, threads,
    )  # fmt: skip
    return out


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, window: int
) -> Tensor:
    """Rows of the decoding sequences: q [B, Hq, D] -> [B, Hq, D]."""
    kernels = compiled()
    if kernels is not None and _fits_kernel(q, k_cache, v_cache):
        kernel = kernels.decode(q.shape[2], q.shape[1] // k_cache.shape[1])
        return _decode_compiled(
            kernel, q, k_cache, v_cache, batch.block_tables, batch.seq_lens, scale, window
        )
    key = ("decode", window, k_cache.stride())
    groups: list[_DecodeGroup] | None = batch.plans.get(key)
    if groups is None:
        groups = batch.plans[key] = _plan_decode(batch, k_cache, q.shape[1], window, q.dtype)
    k_rows, v_rows = as_rows(k_cache), as_rows(v_cache)
    if len(groups) == 1 and groups[0].rows is None:
        return _decode_group(groups[0], q, k_rows, v_rows, scale).view(q.shape)
    out = torch.zeros(q.shape, dtype=q.dtype)
    for group in groups:
        rows = group.rows
        assert rows is not None
        part = _decode_group(group, q.index_select(0, rows), k_rows, v_rows, scale)
        out.index_copy_(0, rows, part.view(len(rows), *q.shape[1:]))
    return out


def _plan_prefill(
    batch: AttentionBatch, cache: Tensor, window: int, dtype: torch.dtype, few: int
) -> list[_Chunk | _Few]:
    starts = batch.query_starts.tolist()
    lengths = batch.seq_lens.tolist()
    chunks: list[_Chunk | _Few] = []
    for i in range(batch.num_decodes, len(lengths)):
        start, end, length = starts[i], starts[i + 1], lengths[i]
        if start == end:
            continue
        if end - start <= few:
            seen = torch.arange(length - (end - start) + 1, length + 1, dtype=torch.int32)
            chunks.append(_Few(start, end, batch.block_tables[i : i + 1], seen))
            continue
        queries = torch.arange(length - (end - start), length)
        first = max(0, int(queries[0]) - window + 1) if window else 0
        positions = torch.arange(first, length)
        slots = _visible_slots(batch, torch.tensor([i]), positions[None], cache.shape[2])
        mask = None
        if len(positions) > len(queries) or 0 < window < len(queries):
            hidden = positions > queries[:, None]
            if window:
                hidden |= positions <= queries[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        chunks.append(_Chunk(start, end, row_ids(cache, slots[0]).T.reshape(-1), mask))
    return chunks


def _prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, window: int, out: Tensor
) -> None:
    """Rows of the sequences behind the decoding ones, from q to out, both [T, Hq, D]."""
    kernels = compiled() if _fits_kernel(q, k_cache, v_cache) else None
    key = ("prefill", window, k_cache.stride())
    chunks: list[_Chunk | _Few] | None = batch.plans.get(key)
    if chunks is None:
        few = FEW if kernels is not None else 0
        chunks = batch.plans[key] = _plan_prefill(batch, k_cache, window, q.dtype, few)
    k_rows, v_rows = as_rows(k_cache), as_rows(v_cache)
    shape = (1, k_cache.shape[1], -1, q.shape[2])
    for chunk in chunks:
        if isinstance(chunk, _Few):
            assert kernels is not None
            kernel = kernels.decode(q.shape[2], q.shape[1] // k_cache.shape[1])
            task_rows = -(-len(chunk.lengths) * k_cache.shape[1] // torch.get_num_threads())
            task_rows = max(1, min(task_rows, len(chunk.lengths), TASK_ROWS))
            rows, tables = q[chunk.start : chunk.end], chunk.table.expand(len(chunk.lengths), -1)
            out[chunk.start : chunk.end] = _decode_compiled(
                kernel, rows, k_cache, v_cache, tables, chunk.lengths, scale, window, task_rows
            )
            continue
        start, end, rows, mask = chunk
        out[start:end] = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1).unsqueeze(0),
            k_rows.index_select(0, rows).view(shape),
            v_rows.index_select(0, rows).view(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)


class _Copied(NamedTuple):
    pages: Tensor  # [n]: those that the step's block tables name
    batch: AttentionBatch  # by their places in that list


def _plan_copies(batch: AttentionBatch) -> _Copied:
    key = ("copied pages",)
    plan: _Copied | None = batch.plans.get(key)
    if plan is None:
        pages, places = torch.unique(batch.block_tables, return_inverse=True)
        tables = places.to(batch.block_tables.dtype)
        plan = batch.plans[key] = _Copied(pages, replace(batch, block_tables=tables, plans={}))
    return plan


def paged_attention_cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, sliding_window: int
) -> Tensor:
    """`kernels.attention.paged_attention` on a CPU."""
    if k_cache.dtype != q.dtype:
        pages, batch = _plan_copies(batch)
        k_cache, v_cache = (cache.index_select(0, pages).to(q.dtype) for cache in (k_cache, v_cache))
    decodes = batch.num_decodes
    if decodes == len(q):
        return _decode(q, k_cache, v_cache, batch, scale, sliding_window)
    out = torch.empty(q.shape, dtype=q.dtype)
    if decodes:
        out[:decodes] = _decode(q[:decodes], k_cache, v_cache, batch, scale, sliding_window)
    _prefill(q, k_cache, v_cache, batch, scale, sliding_window, out)
    return out
