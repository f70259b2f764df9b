"""Tensors of safetensors files, whose bytes stay on disk until they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.weights.source import SourceError

_FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsTensor:
    """One tensor of an open file; its bytes stay on disk until it is read."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self.path, self.file, self.name = path, file, name
        part = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(part.get_shape())
        self.dtype: str = part.get_dtype()
        self.nbytes = _FLOATS.get(self.dtype, 1) * torch.Size(self.shape).numel()

    def read_into(self, target: Tensor) -> None:
        if self.dtype not in _FLOATS:
            raise SourceError(
                f"{self.path}: tensor {self.name} is {self.dtype}; supported: {', '.join(_FLOATS)}"
            )
        target.copy_(self.file.get_tensor(self.name).view(target.shape))


def read_safetensors(files: list[Path]) -> Iterator[SafetensorsTensor]:
    """Every tensor of `files`, in the order they are stored, so that reading them is sequential.

    Raises:
        SourceError: a file is truncated or corrupt.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    yield SafetensorsTensor(path, file, name)
        except (SafetensorError, OSError) as error:
            raise SourceError(f"{path}: not a readable safetensors file: {error}") from error
