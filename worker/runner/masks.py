"""Tokens that must not be sampled: their logits become -inf.

All masks of a request meet here, after bias and penalties, so that nothing brings a token back: first those
that hold for the whole answer (allowed_token_ids, bad words of one token), then those that depend on where
the answer stands (min_tokens, longer bad words), and last of all the form that it must have.

A bad word of several tokens masks its last one where the others come just before. Steps overlap on a GPU: the
token sampled last may not be on the host yet. The host compares what it has, and the device compares that one
token, which it keeps for each row (`last_tokens`), with the one the word has there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.token_mask import mask_tokens
from worker.request import Request
from worker.runner.row_table import RowTable
from worker.runner.transfer import to_device

_ANY = -1  # instead of the token that must come before: whichever it is


@dataclass(frozen=True, slots=True)
class FormMask:
    """For the rows of the logits at `places`: the tokens that the forms of their answers allow next, as
    `bits` [G, W] uint32, bit b of word w for token 32 w + b."""

    places: list[int]
    bits: np.ndarray


class Masks:
    """Masks of the batch's rows.

    Args:
        last_tokens: [rows] int64 on the device, the token sampled last for each row; None where steps never
            overlap.
    """

    def __init__(self, vocab_size: int, device: torch.device, last_tokens: Tensor | None) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._last_tokens = last_tokens
        self._forbidden = RowTable(vocab_size, torch.bool, device)  # for the whole answer

    def begin(self, request: Request) -> None:
        """The request has a new row."""
        if _has_lasting(request):
            allowed = request.params.allowed_token_ids
            forbidden = np.full(self._vocab_size, allowed is not None)
            if allowed is not None:
                forbidden[list(allowed)] = False
            forbidden[[word[0] for word in request.params.bad_words_token_ids if len(word) == 1]] = True
            self._forbidden[request.row].copy_(to_device(torch.from_numpy(forbidden), self._device))

    def apply(self, logits: Tensor, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Mask in the rows `places` of `logits` [R, vocab], in place, for these requests."""
        lasting = [(i, r.row) for i, r in zip(places, requests) if _has_lasting(r)]
        if lasting:
            place, row = to_device(torch.tensor(lasting), self._device).unbind(1)
            logits[place] = logits[place].masked_fill(self._forbidden.values[row], -torch.inf)
        cells = [cell for i, r in zip(places, requests) for cell in self._cells(i, r)]
        if cells:
            self._mask_cells(logits, cells)

    def apply_form(self, logits: Tensor, form: FormMask) -> None:
        """Leave in `logits` [R, vocab], in place, what forms allow."""
        bits = to_device(torch.from_numpy(form.bits.view(np.int32)), self._device)
        mask_tokens(logits, bits, to_device(torch.tensor(form.places), self._device))

    def _cells(self, place: int, request: Request) -> Iterator[tuple[int, int, int]]:
        """(cell of the logits, row, token) of single masks: the cell is masked if `token`, or _ANY, was
        sampled last for the row."""
        first = place * self._vocab_size
        if request.position < request.params.min_tokens:
            # A form knows best when the answer may end.
            held = request.constraint.ends if request.constraint is not None else ()
            for token in request.stop_tokens:
                if token < self._vocab_size and token not in held:
                    yield first + token, request.row, _ANY
        for word in request.params.bad_words_token_ids:
            if len(word) > 1 and len(word) - 1 <= request.position:
                before = _expected(word, request)
                if before is not None:
                    yield first + word[-1], request.row, before

    def _mask_cells(self, logits: Tensor, cells: Sequence[tuple[int, int, int]]) -> None:
        cell, row, token = to_device(torch.tensor(cells), self._device).unbind(1)
        hit = token == _ANY
        if self._last_tokens is not None:
            hit |= token == self._last_tokens[row]
        addends = torch.where(hit, -torch.inf, 0.0).to(logits.dtype)
        logits.view(-1).scatter_add_(0, cell, addends)


def _has_lasting(request: Request) -> bool:
    params = request.params
    return params.allowed_token_ids is not None or any(len(word) == 1 for word in params.bad_words_token_ids)


def _expected(word: Sequence[int], request: Request) -> int | None:
    """The token that must have been sampled last for `word` to be about to end; _ANY when that is certain by
    what the host knows, None when it can't be."""
    assert request.unread <= 1  # as many as the loop's steps overlap
    known = word[: len(word) - 1 - request.unread]
    if known and request.tokens[-len(known) :] != list(known):
        return None
    return word[-2] if request.unread else _ANY
