"""RowTable: what a few of the batch's rows need of the size of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


class RowTable:
    """A tensor [rows, width] of zeros on the device, with as many rows as were ever asked for: the scheduler
    hands out low ones first, so it stays small where few requests use it. Nothing is allocated before."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(0, width, dtype=dtype, device=device)

    def __getitem__(self, row: int) -> Tensor:
        """The row [width], to be written to. Earlier results may point to memory that is no longer used."""
        if row >= len(self.values):
            values = self.values.new_zeros(max(row + 1, 2 * len(self.values)), self.values.shape[1])
            values[: len(self.values)] = self.values
            self.values = values
        return self.values[row]
