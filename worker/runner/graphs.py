"""CUDA graphs for steps in which every sequence decodes: one replay instead of some hundred launches.

A graph is captured for a few batch sizes; a step is padded up to the next one. Padding rows show the empty
block table, so they read and write the null page only.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.prepare import prepare_decode_triton
from worker.model.layers import CausalLM
from worker.runner.batch import UNREAD, BatchState, HostStep
from worker.runner.kv_cache import KvCache


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: close together where a row more costs most, at small batches."""
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, max_num_seqs, 64), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """Captured decode steps, by batch size. Inputs go through one static buffer, logits come out of
    another."""

    def __init__(self, model: CausalLM, state: BatchState, kv_cache: KvCache, sizes: list[int]) -> None:
        self.sizes = sizes
        self._model, self._state, self._kv_cache = model, state, kv_cache
        largest = sizes[-1]
        device = state.tables.device
        self._inputs = torch.zeros(3, largest, dtype=torch.int64, device=device)  # rows, tokens, positions
        self._inputs[0] = state.padding_row
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        dtype = next(model.parameters()).dtype
        self._logits = torch.empty(largest, model.config.vocab_size, dtype=dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # of the graphs' memory; torch's type for it is private

    def compile(self) -> None:
        """Within `compiling_ahead`: have what all sizes launch compiled."""
        for size in self.sizes:
            self._run(size, torch.zeros(size, dtype=torch.int64, device=self._inputs.device))

    @torch.inference_mode()
    def capture(self, on_graph: Callable[[], None] = lambda: None) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory."""
        leading = self._model.config.leading_layers
        for size in reversed(self.sizes):
            self._run(size, layers=leading)  # compiles and loads what isn't there yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self._run(size)
            self.pool = self.pool or graph.pool()
            self._graphs[size] = graph
            on_graph()

    def run(self, host: HostStep) -> Tensor | None:
        """Logits [B, vocab] of a decode-only step; None when no graph is large enough. Valid until the next
        run."""
        count = len(host.tokens)
        place = bisect.bisect_left(self.sizes, count)
        if place == len(self.sizes):
            return None
        size = self.sizes[place]
        inputs = torch.zeros(3, size, dtype=torch.int64, pin_memory=True)
        columns = inputs.numpy()
        columns[0, :count], columns[0, count:] = host.rows, self._state.padding_row
        columns[1, :count] = host.tokens
        columns[2, :count] = host.positions
        self._inputs[:, :size].copy_(inputs, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[:count]

    def _run(self, size: int, tokens: Tensor | None = None, layers: int | None = None) -> None:
        state = self._state
        inputs = self._inputs[:, :size]
        made = prepare_decode_triton(inputs, state.last_tokens, state.tables, state.page_size, UNREAD)
        batch = AttentionBatch(
            positions=state.rotary_rows(inputs[0], inputs[2]),
            slots=made.slots,
            block_tables=made.block_tables,
            seq_lens=made.seq_lens,
            query_starts=self._starts[: size + 1],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=state.tables.shape[1] * state.page_size,
        )
        tokens = made.tokens if tokens is None else tokens
        hidden = self._model.forward(tokens, batch, self._kv_cache.layers[:layers])
        self._model.compute_logits(hidden, out=self._logits[:size])
