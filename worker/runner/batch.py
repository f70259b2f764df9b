"""BatchBuilder: a Step as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from worker.request import Request, Step
from worker.runner.transfer import to_device

UNREAD = -1  # in place of a token id: sampled on the device, not read back yet


@dataclass(slots=True)
class HostStep:
    """A step as host arrays, before anything is copied. T tokens, decoding sequences first.

    rows [T]: the batch row of each token. tokens [T]: ids, or UNREAD. positions [T].
    """

    rows: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray  # [B] tokens of each sequence, the step's included
    starts: np.ndarray  # [B + 1] first token of each sequence
    num_decodes: int
    sample_rows: np.ndarray  # [R] tokens after which one is sampled
    sampled: list[Request]
    fresh: list[Request]  # requests that just got their row

    @property
    def decode_only(self) -> bool:
        """Every sequence has one token and gets one: such a step can run as a CUDA graph."""
        return self.num_decodes == len(self.tokens) == len(self.sampled)


class BatchState:
    """What the device keeps for each row of the batch: its block table and the token sampled last.

    A row belongs to one running request (Request.row). One more row than the batch has, always empty, stands
    in for padding. `first_rows` are those of the rotary table (Request.first_row), where it has two parts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
        *,
        one_table: bool = True,
    ) -> None:
        width = -(-max_model_len // page_size)
        self.page_size = page_size
        self.padding_row = max_num_seqs
        self.tables = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.first_rows = None if one_table else torch.zeros_like(self.last_tokens)
        self._firsts: dict[int, int] = {}  # changed ones
        self._pages: list[list[int] | None] = [
            None
        ] * max_num_seqs  # the very list that the row's table shows
        self._shown = [0] * max_num_seqs
        self._cells: list[int] = []  # changed cells of the tables ...
        self._values: list[int] = []  # ... and the pages that go there

    def sync(self, request: Request) -> bool:
        """Note what changed in the request's block table; True when the row is new to the request."""
        row, pages = request.row, request.pages
        new = self._pages[row] is not pages
        if new:
            self._pages[row] = pages
            self._shown[row] = 0
            if self.first_rows is not None:
                self._firsts[row] = request.first_row
        shown = self._shown[row]
        if shown < len(pages):
            first = row * self.tables.shape[1]
            self._cells += range(first + shown, first + len(pages))
            self._values += pages[shown:]
            self._shown[row] = len(pages)
        return new

    def forget(self) -> None:
        """Rows show nobody's pages, and what was noted of them is never written."""
        self._pages = [None] * len(self._pages)
        self._cells, self._values, self._firsts = [], [], {}

    def flush(self) -> None:
        """Write the noted changes to the device."""
        if self._cells:
            values = torch.tensor(self._values, dtype=torch.int32)
            cells = torch.tensor(self._cells)
            self.tables.view(-1)[to_device(cells, self.tables.device)] = to_device(values, self.tables.device)
            self._cells, self._values = [], []
        if self._firsts and self.first_rows is not None:
            rows, firsts = torch.tensor([list(self._firsts), list(self._firsts.values())])
            self.first_rows[to_device(rows, self.tables.device)] = to_device(firsts, self.tables.device)
            self._firsts = {}

    def tokens(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Token ids with those filled in that only the device knows."""
        return torch.where(tokens == UNREAD, self.last_tokens[rows], tokens)

    def rotary_rows(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Row of the rotary table [T] for each position [T] of the sequence in each row [T]."""
        return positions if self.first_rows is None else positions + self.first_rows[rows]

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Cache slot [T] of the token at each position [T] of the sequence in each row [T]."""
        cells = rows * self.tables.shape[1] + positions // self.page_size
        return self.tables.view(-1)[cells].long() * self.page_size + positions % self.page_size


def host_step(step: Step, state: BatchState) -> HostStep:
    """Lay a step out on the host, and bring the block tables up to date."""
    count, total = len(step.rows), step.num_tokens
    tokens: list[int] = []
    rows = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    lengths = np.empty(count, dtype=np.int32)
    starts = np.zeros(count + 1, dtype=np.int32)
    sample_rows: list[int] = []
    sampled: list[Request] = []
    fresh: list[Request] = []
    at = 0
    for i, row in enumerate(step.rows):
        request, end = row.request, row.start + row.count
        if state.sync(request):
            fresh.append(request)
        tokens += request.tokens[row.start : end]
        if len(tokens) < at + row.count:
            tokens.append(UNREAD)
        if row.count == 1:
            positions[at] = row.start
            rows[at] = request.row
        else:
            positions[at : at + row.count] = np.arange(row.start, end)
            rows[at : at + row.count] = request.row
        at += row.count
        starts[i + 1] = at
        lengths[i] = end
        if row.sample:
            sample_rows.append(at - 1)
            sampled.append(request)
    state.flush()
    decodes = sum(row.decode for row in step.rows)
    return HostStep(
        rows,
        np.array(tokens, dtype=np.int64),
        positions,
        lengths,
        starts,
        decodes,
        np.array(sample_rows, dtype=np.int64),
        sampled,
        fresh,
    )


def device_step(host: HostStep, state: BatchState) -> tuple[Tensor, AttentionBatch]:
    """Token ids [T] and the layout of a step, on the device."""
    device = state.tables.device
    rows = to_device(torch.from_numpy(host.rows), device)
    positions = to_device(torch.from_numpy(host.positions), device)
    tokens = to_device(torch.from_numpy(host.tokens), device)
    widest = int(host.lengths.max())
    width = -(-widest // state.page_size)
    firsts = to_device(torch.from_numpy(host.rows[host.starts[:-1]]), device)
    batch = AttentionBatch(
        positions=state.rotary_rows(rows, positions),
        slots=state.slots(rows, positions),
        block_tables=state.tables[:, :width][firsts],
        seq_lens=to_device(torch.from_numpy(host.lengths), device),
        query_starts=to_device(torch.from_numpy(host.starts), device),
        num_decodes=host.num_decodes,
        max_query_len=int(np.diff(host.starts).max()),
        max_seq_len=widest,
    )
    if UNREAD in host.tokens:
        tokens = state.tokens(rows, tokens)
    return tokens, batch
