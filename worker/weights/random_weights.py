"""Weights for benchmarks: random, the same for the same seed, made on the device they are used on."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

STD: Final = 0.02  # as models of these families are initialised before training


def fill_random(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Matrices and biases from N(0, STD²), norms one; deterministic for a device, a dtype and a seed."""
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, STD, generator=generator)
