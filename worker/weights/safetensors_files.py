"""Tensors of a safetensors directory: one file, or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.weights.source import SAFETENSORS_INDEX, SourceError, read_json

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


def safetensors_files(directory: Path) -> list[Path]:
    """The files that make up the model: those of the index, else model.safetensors, else all there are.

    Raises:
        SourceError: the index is malformed or names a file that isn't there.
    """
    index = directory / SAFETENSORS_INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise SourceError(f"{index}: no weight_map from tensor names to file names")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != directory or not file.is_file():
            raise SourceError(f"{index}: names the file {file.name}, which isn't in {directory}")
    return files


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
