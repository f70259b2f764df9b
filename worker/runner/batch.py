"""BatchBuilder: a Step as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from worker.engine.request import Request
from worker.engine.scheduler import Step


@dataclass(slots=True)
class StepInputs:
    """What the model reads: token ids [T], the layout, and which rows [R] the sampler needs, with their
    requests."""

    token_ids: Tensor
    attention: AttentionBatch
    sample_rows: Tensor
    sampled: list[Request]
    fresh: list[Request]  # requests that just got their row of the batch state


class BatchBuilder:
    """Keeps the block table of every row of the batch, so that a step copies only what changed.

    A row belongs to one running request (Request.row). Positions count from 0.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // page_size)), dtype=np.int32)
        self._pages: list[list[int] | None] = [
            None
        ] * max_num_seqs  # the very list that the row's table shows
        self._shown = [0] * max_num_seqs

    def build(self, step: Step, last_tokens: Tensor) -> StepInputs:
        """Tensors of a step. `last_tokens` [max_num_seqs] holds, on the device, what was sampled for each row
        last."""
        rows = step.rows
        count = len(rows)
        total = step.num_tokens
        tokens: list[int] = []
        positions = np.empty(total, dtype=np.int64)
        lengths = np.empty(count, dtype=np.int32)
        starts = np.zeros(count + 1, dtype=np.int32)
        batch_rows = np.empty(count, dtype=np.int64)
        owner = np.empty(total, dtype=np.int64)
        fresh: list[Request] = []
        unread: list[tuple[int, int]] = []  # (token's place, batch row): sampled, not read back yet
        at = 0
        for i, row in enumerate(rows):
            request, end = row.request, row.start + row.count
            if self._sync_table(request):
                fresh.append(request)
            tokens += request.tokens[row.start : end]
            if len(tokens) < at + row.count:
                unread.append((at + row.count - 1, request.row))
                tokens.append(0)
            positions[at : at + row.count] = np.arange(row.start, end)
            owner[at : at + row.count] = i
            at += row.count
            starts[i + 1] = at
            lengths[i] = end
            batch_rows[i] = request.row
        widest = int(lengths.max())
        tables = self._tables[batch_rows, : -(-widest // self.page_size)]
        slots = (
            tables[owner, positions // self.page_size].astype(np.int64) * self.page_size
            + positions % self.page_size
        )
        decodes = sum(row.decode for row in rows)
        sampled = [row.request for row in rows if row.sample]
        ends = starts[1:][[row.sample for row in rows]].astype(np.int64) - 1
        token_ids = self._put(np.array(tokens, dtype=np.int64))
        if unread:
            places, unread_rows = (torch.tensor(x, device=self.device) for x in zip(*unread))
            token_ids[places] = last_tokens[unread_rows]
        attention = AttentionBatch(
            positions=self._put(positions),
            slots=self._put(slots),
            block_tables=self._put(tables),
            seq_lens=self._put(lengths),
            query_starts=self._put(starts),
            num_decodes=decodes,
            max_query_len=max(row.count for row in rows),
            max_seq_len=widest,
        )
        return StepInputs(token_ids, attention, self._put(ends), sampled, fresh)

    def _sync_table(self, request: Request) -> bool:
        """Bring the row's block table up to date; True when the row is new to the request."""
        row, pages = request.row, request.pages
        new = self._pages[row] is not pages
        if new:
            self._pages[row] = pages
            self._shown[row] = 0
        shown = self._shown[row]
        if shown < len(pages):
            self._tables[row, shown : len(pages)] = pages[shown:]
            self._shown[row] = len(pages)
        return new

    def _put(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
