"""Pooler: hidden states of prompts to one vector each, over as many steps as a prompt takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.request import Request, Row, Step
from worker.runner.transfer import to_host


@dataclass(slots=True)
class Piece:
    """A row of a step that is pooled: its states are [first, end) of those that were asked for; `complete`
    when it is the prompt's last."""

    row: Row
    first: int
    end: int
    complete: bool


class Pooled:
    """Vectors of prompts that a step completed, on their way to the host."""

    def __init__(self, requests: list[Request], vectors: Tensor) -> None:
        self._requests = requests
        self._host = to_host(vectors)
        self._copied: torch.cuda.Event | None = None
        if vectors.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> dict[Request, np.ndarray]:
        """Float32 vectors [hidden_size] by request. Waits for this step only."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._requests, self._host.numpy()))


class Pooler:
    """Keeps the sums of prompts that are under way, by their row of the batch."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def plan(self, step: Step, starts: np.ndarray) -> tuple[np.ndarray, list[Piece]]:
        """Places [P] in the step of the tokens whose states are needed, and what they are for. `starts`: the
        first token of each row."""
        places: list[np.ndarray] = []
        pieces: list[Piece] = []
        count = 0
        for i, row in enumerate(step.rows):
            if row.request.pooling is None:
                continue
            end = int(starts[i + 1])
            complete = row.start + row.count == row.request.prompt_length
            if row.request.pooling == "mean":
                first = int(starts[i])
            elif complete:
                first = end - 1
            else:
                continue
            places.append(np.arange(first, end))
            pieces.append(Piece(row, count, count + end - first, complete))
            count += end - first
        return np.concatenate([*places, np.zeros(0, np.int64)]), pieces

    def pool(self, hidden: Tensor, pieces: list[Piece]) -> Pooled | None:
        """`hidden` [P, hidden_size]: what `plan` asked for. The vectors of prompts that are complete."""
        requests: list[Request] = []
        vectors: list[Tensor] = []
        for piece in pieces:
            request = piece.row.request
            vector = hidden[piece.first : piece.end].sum(0, dtype=torch.float32)
            if request.pooling == "mean":
                before = self._sums.pop(request.row, None)
                if piece.row.start > 0 and before is not None:
                    vector = vector + before
                if not piece.complete:
                    self._sums[request.row] = vector
                    continue
                vector = vector / request.prompt_length
            requests.append(request)
            vectors.append(vector)
        return Pooled(requests, torch.stack(vectors)) if requests else None
