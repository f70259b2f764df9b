"""Log-probabilities of prompts, of the pieces that a step computes anyway.

The state after a token says how likely the next one was. Logits take far more memory than states, so they
are made and dropped in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.ipc.messages import PromptLogprobs
from worker.request import Request, Step
from worker.runner.transfer import to_device, to_host

MOST_BYTES = 64 << 20  # of float32 logits at a time


@dataclass(slots=True)
class Piece:
    """Tokens [start, start + count) of a request's prompt."""

    request: Request
    start: int
    count: int


class Scored:
    """Log-probabilities of pieces of prompts, on their way to the host."""

    def __init__(self, pieces: list[Piece], columns: list[Tensor]) -> None:
        self._pieces = pieces
        self._host = [to_host(column) for column in columns]
        self._copied: torch.cuda.Event | None = None
        if columns[0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[tuple[Request, PromptLogprobs]]:
        """Waits for this step only."""
        if self._copied is not None:
            self._copied.synchronize()
        logprobs, ranks, top_ids, top_logprobs = (column.numpy() for column in self._host)
        read = []
        first = 0
        for piece in self._pieces:
            rows = slice(first, first + piece.count)
            width = piece.request.params.prompt_logprobs or 0
            entries = PromptLogprobs(
                piece.start,
                width,
                logprobs[rows].tobytes(),
                ranks[rows].tobytes(),
                top_ids[rows, :width].tobytes(),
                top_logprobs[rows, :width].tobytes(),
            )
            read.append((piece.request, entries))
            first += piece.count
        return read


class PromptScorer:
    """Finds what a step brings for requests with `prompt_logprobs`, each token once: one that is preempted
    computes its prompt again, but what it has told it doesn't tell again."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int, vocab_limit: int) -> None:
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit
        self._rows = max(1, MOST_BYTES // (4 * vocab_size))

    def plan(self, step: Step, starts: np.ndarray) -> tuple[np.ndarray, list[Piece]]:
        """Places [P] in the step of the tokens whose states are needed, and what they are for. `starts`: the
        first token of each row. Marks these tokens as scored."""
        places = [np.zeros(0, np.int64)]
        pieces = []
        for row, at in zip(step.rows, starts):
            request = row.request
            start, end = request.scored, min(row.start + row.count + 1, request.prompt_length)
            if start < end:
                first = int(at) + start - 1 - row.start
                places.append(np.arange(first, first + end - start))
                pieces.append(Piece(request, start, end - start))
                request.scored = end
        return np.concatenate(places), pieces

    def score(self, hidden: Tensor, pieces: list[Piece]) -> Scored | None:
        """`hidden` [P, hidden_size]: what `plan` asked for."""
        if not pieces:
            return None
        tokens = [t for p in pieces for t in p.request.tokens[p.start : p.start + p.count]]
        targets = to_device(torch.tensor(tokens), hidden.device)
        width = max(1, *(piece.request.params.prompt_logprobs or 0 for piece in pieces))
        parts = [
            self._score(states, wanted, width)
            for states, wanted in zip(hidden.split(self._rows), targets.split(self._rows))
        ]
        return Scored(pieces, [torch.cat(column) for column in zip(*parts)])

    def _score(self, hidden: Tensor, targets: Tensor, width: int) -> tuple[Tensor, ...]:
        """Of each token: log-probability, rank, likeliest ids, and their log-probabilities."""
        logits = self._compute_logits(hidden).float()
        if self._vocab_limit < self._vocab_size:
            logits[:, self._vocab_limit :] = -torch.inf
        total = logits.logsumexp(dim=-1, keepdim=True)
        chosen = logits.gather(1, targets[:, None])
        ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
        values, ids = logits.topk(width, dim=-1)
        return (chosen - total).squeeze(1), ranks, ids.int(), values - total
