"""CUDA graphs for small steps in which prompts run beside decoding sequences.

A graph is captured for a few numbers of tokens. Each has a place for every decoding sequence and for a few
prompts; places that a step leaves empty hold a sequence of no tokens. The output layer is not part of it: how
many rows sample differs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from worker.model.layers import CausalLM
from worker.runner.batch import BatchState, HostStep
from worker.runner.kv_cache import KvCache

PROMPTS = 8  # places for sequences with more than one token
LARGEST = 1280  # tokens; beyond, the device works longer than the host takes to launch


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens worth a graph."""
    largest = min(LARGEST, max_num_batched_tokens)
    sizes = (16, 32, *range(64, 1024, 64), *range(1024, largest, 128))
    return sorted({*(size for size in sizes if size < largest), largest})


Array = TypeVar("Array", Tensor, np.ndarray)


class _Inputs(NamedTuple, Generic[Array]):
    """Parts of one buffer of int64, for T tokens and S sequences."""

    rows: Array  # [T]
    tokens: Array  # [T]
    positions: Array  # [T]
    sequence_rows: Array  # [S]
    lengths: Array  # [S]
    starts: Array  # [S + 1]


class MixedGraphs:
    """Captured mixed steps, by number of tokens. One static buffer in, hidden states out."""

    def __init__(
        self, model: CausalLM, state: BatchState, kv_cache: KvCache, sizes: list[int], max_num_seqs: int
    ) -> None:
        self.sizes = sizes
        self._model, self._state, self._kv_cache = model, state, kv_cache
        self._max_num_seqs = max_num_seqs
        device = state.tables.device
        self._buffer = torch.zeros(self._length(sizes[-1]), dtype=torch.int64, device=device)
        hidden_size, dtype = model.config.hidden_size, next(model.parameters()).dtype
        self._hidden = torch.empty(sizes[-1], hidden_size, dtype=dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def compile(self) -> None:
        """Within `compiling_ahead`: have what all sizes launch compiled."""
        for size in self.sizes:
            self._run(size)

    @torch.inference_mode()
    def capture(self, pool: Any, on_graph: Callable[[], None]) -> None:
        """Capture all sizes, the largest first, in the memory of `pool`."""
        leading = self._model.config.leading_layers
        for size in reversed(self.sizes):
            empty = torch.zeros(self._length(size), dtype=torch.int64)
            parts = self._split(empty, size)
            parts.rows.fill_(self._state.padding_row)
            parts.sequence_rows.fill_(self._state.padding_row)
            self._buffer[: len(empty)] = empty.to(self._buffer.device)
            self._run(size, layers=leading)  # compiles and loads what isn't there yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._run(size)
            pool = pool or graph.pool()
            self._graphs[size] = graph
            on_graph()

    def forward(self, host: HostStep) -> Tensor | None:
        """Hidden states of a step's tokens and of padding behind them; None when no graph fits. Valid until
        the next run."""
        count, sequences = len(host.tokens), len(host.lengths)
        place = bisect.bisect_left(self.sizes, count)
        if place == len(self.sizes) or sequences - host.num_decodes > PROMPTS:
            return None
        size = self.sizes[place]
        inputs = torch.empty(self._length(size), dtype=torch.int64, pin_memory=True)
        self._fill(_Inputs(*(part.numpy() for part in self._split(inputs, size))), host, size)
        self._buffer[: len(inputs)].copy_(inputs, non_blocking=True)
        self._graphs[size].replay()
        return self._hidden[:size]

    def _decodes(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def _length(self, size: int) -> int:
        return 3 * size + 3 * (self._decodes(size) + PROMPTS) + 1

    def _split(self, buffer: Tensor, size: int) -> _Inputs[Tensor]:
        sequences = self._decodes(size) + PROMPTS
        parts = buffer[: self._length(size)].split([size] * 3 + [sequences] * 2 + [sequences + 1])
        return _Inputs(*parts)

    def _fill(self, inputs: _Inputs[np.ndarray], host: HostStep, size: int) -> None:
        count, decodes, prompts = len(host.tokens), host.num_decodes, len(host.lengths) - host.num_decodes
        padding = self._state.padding_row
        first = self._decodes(size)
        firsts = host.rows[host.starts[:-1]]
        for part, values, rest in (
            (inputs.rows, host.rows, padding),
            (inputs.tokens, host.tokens, 0),
            (inputs.positions, host.positions, 0),
        ):
            part[:count], part[count:] = values, rest
        for part, values, rest in (
            (inputs.sequence_rows, firsts, padding),
            (inputs.lengths, host.lengths, 0),
        ):
            part[:] = rest
            part[:decodes] = values[:decodes]
            part[first : first + prompts] = values[decodes:]
        inputs.starts[:first] = np.arange(first)
        inputs.starts[first:] = count
        inputs.starts[first : first + prompts] = host.starts[decodes:-1]

    def _run(self, size: int, layers: int | None = None) -> None:
        state = self._state
        inputs = self._split(self._buffer, size)
        tables = state.tables[inputs.sequence_rows]
        batch = AttentionBatch(
            positions=state.rotary_rows(inputs.rows, inputs.positions),
            slots=state.slots(inputs.rows, inputs.positions),
            block_tables=tables,
            seq_lens=inputs.lengths.int(),
            query_starts=inputs.starts.int(),
            num_decodes=self._decodes(size),
            max_query_len=size,
            max_seq_len=tables.shape[1] * state.page_size,
        )
        tokens = state.tokens(inputs.rows, inputs.tokens)
        self._hidden[:size] = self._model.forward(tokens, batch, self._kv_cache.layers[:layers])
