"""Tokens that must not be sampled: their logits become -inf.

All masks of a request come after bias and penalties, so that nothing brings a token back: first those that
hold for the whole answer (allowed_token_ids, bad words of one token), then those that depend on where the
answer stands (min_tokens, longer bad words), and last of all the form that it must have (form_masks.py).

A bad word of several tokens masks its last one where the others come just before. Steps overlap on a GPU: the
token sampled last may not be on the host yet. The host compares what it has, and the device compares that one
token, which it keeps for each row (`last_tokens`), with the one the word has there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.request import Request
from worker.runner.row_table import RowTable
from worker.runner.transfer import to_device

_ANY = -1  # instead of the token that must come before: whichever it is
_Words = dict[int, list[tuple[int, ...]]]


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
        self._lasting: set[int] = set()  # rows that have something there
        self._words: dict[int, tuple[_Words, _Words]] = {}  # by row, and by how many tokens are unread

    def begin(self, request: Request) -> None:
        """The request has a new row."""
        allowed, words = request.params.allowed_token_ids, request.params.bad_words_token_ids
        self._words[request.row] = _words(words, 0), _words(words, 1)
        singles = [word[0] for word in words if len(word) == 1]
        if allowed is None and not singles:
            self._lasting.discard(request.row)
            return
        self._lasting.add(request.row)
        forbidden = np.full(self._vocab_size, allowed is not None)
        if allowed is not None:
            forbidden[list(allowed)] = False
        forbidden[singles] = True
        self._forbidden[request.row].copy_(to_device(torch.from_numpy(forbidden), self._device))

    def apply(self, logits: Tensor, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Mask in the rows `places` of `logits` [R, vocab], in place, for these requests."""
        lasting = [(i, r.row) for i, r in zip(places, requests) if r.row in self._lasting]
        if lasting:
            place, row = to_device(torch.tensor(lasting), self._device).unbind(1)
            logits[place] = logits[place].masked_fill(self._forbidden.values[row], -torch.inf)
        cells = [cell for i, r in zip(places, requests) for cell in self._cells(i, r)]
        if cells:
            self._mask_cells(logits, cells)

    def _cells(self, place: int, request: Request) -> Iterator[tuple[int, int, int, int]]:
        """(place, column, row, token) of single masks: that cell of the logits is masked if `token`, or _ANY,
        was sampled last for the row."""
        if request.position < request.params.min_tokens:
            # A form knows best when the answer may end.
            held = request.constraint.ends if request.constraint is not None else ()
            for token in request.stop_tokens:
                if token < self._vocab_size and token not in held:
                    yield place, token, request.row, _ANY
        if request.params.bad_words_token_ids and request.position:
            likely = self._words[request.row][request.unread]  # the loop's steps overlap by one
            for word in (*likely.get(_ANY, ()), *likely.get(request.tokens[-1], ())):
                if _about_to_end(word, request):
                    yield place, word[-1], request.row, word[-2] if request.unread else _ANY

    def _mask_cells(self, logits: Tensor, cells: Sequence[tuple[int, int, int, int]]) -> None:
        place, column, row, token = to_device(torch.tensor(cells), self._device).unbind(1)
        hit = token == _ANY
        if self._last_tokens is not None:
            hit |= token == self._last_tokens[row]
        addends = torch.where(hit, -torch.inf, 0.0).to(logits.dtype)
        # Added: a cell can be there twice. By place and column: between rows there may be columns to spare.
        logits.index_put_((place, column), addends, accumulate=True)


def _words(words: Sequence[tuple[int, ...]], unread: int) -> _Words:
    """Bad words of several tokens by the last one that must be known before them, or _ANY."""
    found: _Words = {}
    for word in words:
        if len(word) > 1:
            known = word[: len(word) - 1 - unread]
            found.setdefault(known[-1] if known else _ANY, []).append(word)
    return found


def _about_to_end(word: Sequence[int], request: Request) -> bool:
    """Whether all of `word` but its last token has come, as far as the host can know."""
    known = word[: len(word) - 1 - request.unread]
    if len(word) - 1 > request.position:
        return False
    return not known or request.tokens[-len(known) :] == list(known)
