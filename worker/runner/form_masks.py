"""What the forms of answers allow, on its way to the device: one bit a token, for the rows that need it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.token_mask import mask_tokens

_ALIGNED = 4  # words: the kernel reads masks by 16 bytes


@dataclass(frozen=True, slots=True)
class FormMask:
    """Memory for one step's masks, for whoever knows the forms to write to, and for `apply` then.

    `bits` [G, W] uint32: for each of the rows of the logits that were told to `FormMasks.begin`, the tokens
    that may come next, bit b of word w for token 32 w + b.
    """

    bits: np.ndarray
    memory: FormMasks

    def apply(self, logits: Tensor) -> None:
        """Leave in `logits` [R, vocab], in place, what the forms allow."""
        self.memory.apply(logits, *self.bits.shape)


class FormMasks:
    """Memory for the masks of a step: on a GPU page-locked on the host, and as much on the device; taken with
    the first form and kept. Copies are queued with the step's other work: nobody waits for them.

    Args:
        rows: that a step can have.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._head = (
            -(-rows // _ALIGNED) * _ALIGNED
        )  # words before the masks, which say what rows they are of
        self._host = self._there = torch.empty(0, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None

    def begin(self, places: list[int], words: int) -> FormMask:
        """Masks of so many words for these rows of the logits. Those of the step before are gone: they must
        have been applied."""
        if self._copied is not None:
            self._copied.synchronize()  # long ago: whoever writes masks has read the tokens of that step
        count, used = len(places), self._head + len(places) * words
        if self._host.numel() < used:
            self._take(self._head + self._rows * words)
        memory = self._host.numpy()
        memory[:count] = places
        bits = memory[self._head : used].view(np.uint32).reshape(count, words)
        return FormMask(bits, self)

    def apply(self, logits: Tensor, count: int, words: int) -> None:
        """See FormMask.apply."""
        used = self._head + count * words
        if self._copied is not None:
            self._there[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record()
        mask_tokens(logits, self._there[self._head : used].view(count, words), self._there[:count])

    def _take(self, size: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._host = self._there = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)
        if on_gpu:
            self._there = torch.empty(size, dtype=torch.int32, device=self._device)
            self._copied = torch.cuda.Event()


def compile_form_masks(logits: Tensor) -> None:
    """Have compiled what `apply` launches for such logits [1, vocab]; they are changed."""
    mask = torch.zeros(1, _ALIGNED, dtype=torch.int32, device=logits.device)
    mask_tokens(logits, mask, torch.zeros(1, dtype=torch.int32, device=logits.device))
