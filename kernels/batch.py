"""AttentionBatch: where each row of a step lives in the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NULL_PAGE = 0  # never read, never written: where padding rows point


@dataclass(slots=True)
class AttentionBatch:
    """Layout of one step: T query tokens of B sequences, decoding sequences first.

    Sequence i owns rows query_starts[i]:query_starts[i+1]; they are the *last* positions of its seq_lens[i]
    tokens (earlier ones are in the cache already). The first `num_decodes` sequences have exactly one row
    each, so the first `num_decodes` rows are theirs.

    KV cache of a layer: k_cache, v_cache of shape [num_pages, num_kv_heads, page_size, head_dim]. Token
    position p of sequence i lies in page block_tables[i, p // page_size] at offset p % page_size; its slot is
    page * page_size + offset. Page 0 is the null page: nothing is ever read from it, and padding rows (slot <
    page_size) are not written.

    A decoding sequence of length 0 is a place left empty (in a graph): the row at its place may belong to a
    chunk behind. block_tables and seq_lens must be complete before the step's first kernel starts: kernels
    that start early (pdl.py) read them at once.

    block_tables [B, M] int32, seq_lens [B] int32, query_starts [B + 1] int32, slots [T] int64. positions [T]
    int64 are rows of the rotary table: a token's position, behind the row where its sequence's table begins.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    plans: dict[tuple[Any, ...], Any] = field(
        default_factory=dict
    )  # what a device path derives once a step, for all layers

    @property
    def decode_only(self) -> bool:
        """Every row is a decoding sequence's. Counting rows doesn't tell: a graph of few tokens has a place
        to decode for each of them, and others for chunks."""
        return len(self.seq_lens) == self.num_decodes == len(self.positions)
