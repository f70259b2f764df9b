"""Runs a model over a paged cache as the engine does, every page poisoned and handed out in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from worker.model.layers import CausalLM

PAGE = 16


@contextmanager
def one_thread() -> Iterator[None]:
    """In short steps, threads that wait for each other cost more than the work they share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PagedRun:
    """Sequences by name, each with the tokens it was fed so far; all by one part of the rotary table."""

    def __init__(
        self,
        model: CausalLM,
        num_pages: int = 64,
        first_row: int = 0,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        shape = (num_pages, config.num_kv_heads, PAGE, config.head_dim)
        self.model = model
        self.first_row = first_row
        poison = torch.full((config.num_layers, 2, *shape), torch.nan, dtype=cache_dtype)
        self.caches = [(layer[0], layer[1]) for layer in poison]
        self.free = list(range(1, num_pages))
        random.Random(0).shuffle(self.free)
        self.pages: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    @torch.inference_mode()
    def feed(self, step: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """One step: more tokens of each sequence -> its logits [tokens, vocab]."""
        names = sorted(step, key=lambda name: len(step[name]) > 1)
        hidden = self.model.forward(
            torch.tensor([token for name in names for token in step[name]]),
            self.batch(names, [len(step[name]) for name in names]),
            self.caches,
        )
        logits = self.model.compute_logits(hidden).split([len(step[name]) for name in names])
        return dict(zip(names, logits, strict=True))

    def batch(self, names: list[str], counts: list[int]) -> AttentionBatch:
        positions, slots = [], []
        for name, count in zip(names, counts, strict=True):
            start = self.length.get(name, 0)
            pages = self.pages.setdefault(name, [])
            while len(pages) * PAGE < start + count:
                pages.append(self.free.pop())
            own = range(start, start + count)
            positions += own
            slots += [pages[p // PAGE] * PAGE + p % PAGE for p in own]
            self.length[name] = start + count
        width = max(len(self.pages[name]) for name in names)
        lengths = [self.length[name] for name in names]
        return AttentionBatch(
            positions=torch.tensor(positions) + self.first_row,
            slots=torch.tensor(slots),
            block_tables=torch.tensor(
                [self.pages[name] + [0] * (width - len(self.pages[name])) for name in names],
                dtype=torch.int32,
            ),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            query_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            num_decodes=sum(count == 1 for count in counts),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
        )
