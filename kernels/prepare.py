"""Inputs of a decode step from what the device keeps for each row of the batch, by one kernel for a dozen."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


class DecodeInputs(NamedTuple):
    """For B sequences: tokens [B] int64, slots [B] int64, seq_lens [B] int32, block_tables [B, M] int32,
    valid as far as a sequence reaches."""

    tokens: Tensor
    slots: Tensor
    seq_lens: Tensor
    block_tables: Tensor


@triton.jit
def _prepare_kernel(
    p_rows, p_tokens, p_positions, p_last, p_tables, p_token, p_slot, p_length, p_table, width,
    UNREAD: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(p_rows + i)
    position = tl.load(p_positions + i)
    p_row = p_tables + row * width
    last_page = position // PAGE_SIZE
    o_page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_page = o_page <= last_page
    tl.store(
        p_table + i.to(tl.int64) * width + o_page, tl.load(p_row + o_page, mask=m_page, other=0), mask=m_page
    )
    if tl.program_id(1) == 0:
        token = tl.load(p_tokens + i)
        tl.store(p_token + i, tl.where(token == UNREAD, tl.load(p_last + row), token))
        tl.store(p_slot + i, tl.load(p_row + last_page).to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(p_length + i, (position + 1).to(tl.int32))


def prepare_decode_triton(
    inputs: Tensor, last_tokens: Tensor, tables: Tensor, page_size: int, unread: int
) -> DecodeInputs:
    """What a step needs in which each of B sequences has one token.

    Args:
        inputs: [3, B] int64: row of the batch, token id or `unread`, position; rows contiguous.
        last_tokens: [R] int64: the token that each row of the batch sampled last, for `unread`.
        tables: [R, M] int32, contiguous: block table of each row.
        page_size: tokens a page.
        unread: the token id that stands for the last sampled one.
    """
    rows, tokens, positions = inputs
    count, width = len(rows), tables.shape[1]
    made = DecodeInputs(
        torch.empty_like(rows), torch.empty_like(rows),
        torch.empty(count, dtype=torch.int32, device=rows.device),
        torch.empty((count, width), dtype=torch.int32, device=rows.device),
    )  # fmt: skip
    _prepare_kernel[(count, triton.cdiv(width, BLOCK))](
        rows, tokens, positions, last_tokens, tables, *made, width,
        UNREAD=unread, PAGE_SIZE=page_size, BLOCK=BLOCK,
    )  # fmt: skip
    return made
