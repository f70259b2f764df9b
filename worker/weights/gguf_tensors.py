"""Tensors of a GGUF file, dequantised while they are copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

from worker.weights.gguf_header import GGML_TYPES, GgufHeader, TensorInfo
from worker.weights.source import SourceError

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK: Final = 1 << 18  # elements dequantised at once: intermediate results stay in the CPU's cache


class GgufTensor:
    """One tensor of a mapped file."""

    def __init__(self, info: TensorInfo, data: np.ndarray[Any, np.dtype[np.uint8]], file: str) -> None:
        self.name, self.shape, self.nbytes = info.name, info.shape, info.nbytes
        self.type_id, self.type_name = info.type_id, info.type_name
        self.data = data[info.offset : info.offset + info.nbytes]
        self.file = file

    def read_into(self, target: Tensor) -> None:
        plain = _PLAIN.get(self.type_name)
        if plain is not None:
            target.copy_(torch.from_numpy(self.data).view(plain).view(target.shape))
            return
        if not target.is_contiguous():
            whole = torch.empty(target.shape, dtype=torch.float32)
            self._dequantise(whole.view(-1))
            target.copy_(whole)
            return
        self._dequantise(target.view(-1))

    def _dequantise(self, target: Tensor) -> None:
        _, block, block_bytes = GGML_TYPES[self.type_id]
        step = _CHUNK // block
        for first in range(0, self.nbytes // block_bytes, step):
            raw = self.data[first * block_bytes : (first + step) * block_bytes]
            try:
                # One row of many blocks: gguf's own loop over rows costs more than the arithmetic.
                values = gguf.dequantize(raw[None], gguf.GGMLQuantizationType(self.type_id))[0]
            except NotImplementedError as error:
                raise SourceError(
                    f"{self.file}: tensor {self.name}: type {self.type_name} can't be dequantised"
                ) from error
            start = first * block
            target[start : start + values.size].copy_(torch.from_numpy(values))


def read_gguf(header: GgufHeader) -> Iterator[GgufTensor]:
    """Every tensor of the file, in the order of its table."""
    # Copy-on-write because torch has no read-only tensors; nothing writes to it.
    data = np.memmap(header.path, dtype=np.uint8, mode="c")
    for info in header.tensors:
        yield GgufTensor(info, data, str(header.path))
