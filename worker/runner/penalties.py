"""What is added to logits, and what divides them: bias and penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.params import SamplingParams
from worker.request import Request
from worker.runner.row_table import RowTable
from worker.runner.transfer import to_device


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class Penalties:
    """Bias and penalties of the batch's rows. Token counts live on the device, so that a step counts what the
    one before sampled without anybody having read it."""

    def __init__(self, vocab_size: int, vocab_limit: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit
        self._output_counts = RowTable(vocab_size, torch.int32, device)
        self._prompt_seen = RowTable(vocab_size, torch.bool, device)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by row: token ids, addends

    def begin(self, request: Request) -> None:
        """The request has a new row: take in the tokens it brings."""
        params = request.params
        if params.logit_bias:
            real = {token: bias for token, bias in params.logit_bias.items() if token < self._vocab_limit}
            self._bias[request.row] = (
                np.array(list(real), np.int64),
                np.array(list(real.values()), np.float32),
            )
        if has_penalties(params):
            prompt = np.array(request.tokens[: request.prompt_length])
            output = np.array(request.tokens[request.prompt_length :], np.int64)
            seen = np.zeros(self._vocab_size, bool)
            seen[prompt] = True
            counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
            self._prompt_seen[request.row].copy_(to_device(torch.from_numpy(seen), self._device))
            self._output_counts[request.row].copy_(to_device(torch.from_numpy(counts), self._device))

    def apply(self, logits: Tensor, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Change the rows `places` of `logits` [R, vocab] in place, for these requests."""
        biased = [(i, r) for i, r in zip(places, requests) if r.params.logit_bias]
        if biased:
            self._add_bias(logits, biased)
        punished = [(i, r) for i, r in zip(places, requests) if has_penalties(r.params)]
        if punished:
            self._penalise(logits, punished)

    def count(self, tokens: Tensor, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Count the token that was just sampled for each of these requests, in the rows `places` of `tokens`
        [R]."""
        counted = [(i, r.row) for i, r in zip(places, requests) if has_penalties(r.params)]
        if counted:
            place, row = self._indices(counted).unbind(1)
            self._output_counts.values[row, tokens[place]] += 1

    def _add_bias(self, logits: Tensor, biased: Sequence[tuple[int, Request]]) -> None:
        cells = np.concatenate([self._bias[r.row][0] + i * self._vocab_size for i, r in biased])
        addends = np.concatenate([self._bias[r.row][1] for _, r in biased])
        logits.view(-1).scatter_add_(
            0,
            to_device(torch.from_numpy(cells), self._device),
            to_device(torch.from_numpy(addends), self._device),
        )

    def _penalise(self, logits: Tensor, punished: Sequence[tuple[int, Request]]) -> None:
        """Repetition (arXiv 1909.05858): divide positive, multiply negative logits of tokens seen in prompt
        or output; presence and frequency (OpenAI): subtract for tokens of the output, once and as often as
        they came."""
        places, rows = self._indices([(i, r.row) for i, r in punished]).unbind(1)
        amounts = [
            (r.params.repetition_penalty, r.params.presence_penalty, r.params.frequency_penalty)
            for _, r in punished
        ]
        columns = to_device(torch.tensor(amounts, dtype=torch.float32), self._device)
        repetition, presence, frequency = columns.tensor_split(3, dim=1)
        counts = self._output_counts.values[rows]
        present = counts > 0
        chosen = logits[places]
        factor = torch.where(present | self._prompt_seen.values[rows], repetition, 1.0)
        chosen = torch.where(chosen > 0, chosen / factor, chosen * factor)
        logits[places] = chosen - frequency * counts - presence * present

    def _indices(self, values: Sequence[tuple[int, int]]) -> Tensor:
        return to_device(torch.tensor(values), self._device)
