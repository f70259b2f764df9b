"""The header of a GGUF file: metadata and the table of tensors, without touching the weights.

Layout (ggml/docs/gguf.md, versions 2 and 3, little-endian): magic, version u32, tensor count u64, metadata
count u64, metadata (key string, type u32, value), tensor table (name, rank u32, dimensions u64 innermost
first, type u32, offset u64 from the start of the data), padding to `general.alignment`, data. A string is its
length u64 and UTF-8 bytes.

Every count and length is checked against the bytes that are left before anything is allocated from it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_RANK: Final = 4
MAX_NAME: Final = 65535
MAX_NESTING: Final = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Final = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]

# ggml type id -> (name, elements a block, bytes a block), from ggml.h and ggml-quants.h.
GGML_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


class GgufError(ValueError):
    """The file isn't a GGUF file that can be read; the message names the file and what is wrong."""


class NotGguf(GgufError):
    """It is another kind of file."""


class TensorInfo(NamedTuple):
    """One row of the tensor table: shape outermost first (torch's order), offset from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata as Python values (strings in lists, numeric arrays as numpy arrays), and the tensor table."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read the header of `path`.

    Raises:
        NotGguf: another kind of file.
        GgufError: an unsupported version or tensor type, truncated, or inconsistent in itself.
        OSError: the file can't be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.seek(0, 2) < len(MAGIC) + 20:
            raise NotGguf(f"{path}: too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise NotGguf(f"{self.path}: not a GGUF file (it doesn't start with 'GGUF')")
        self.at = 4
        version = int(self.scalar(_U32))
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self.error("a big-endian GGUF file; only little-endian ones can be read")
            raise self.error(f"GGUF version {version} can't be read; versions 2 and 3 can")
        num_tensors = self.count(8 + 4 + 8 + 4 + 8, "tensors")
        num_metadata = self.count(8 + 4 + 1, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self.name("metadata key")
            if key in metadata:
                raise self.error(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(int(self.scalar(_U32)), key)
        rows = [self.tensor_row() for _ in range(num_tensors)]
        return GgufHeader(self.path, version, metadata, self.resolve(rows, self.alignment(metadata)))

    def error(self, what: str) -> GgufError:
        return GgufError(f"{self.path}: {what}")

    def take(self, nbytes: int) -> int:
        """Move past `nbytes` and return where they begin."""
        start, end = self.at, self.at + nbytes
        if end > self.size:
            raise self.error(
                f"truncated or corrupt: {nbytes} bytes wanted at {start}, file ends at {self.size}"
            )
        self.at = end
        return start

    def scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self.data, self.take(kind.size))[0]

    def count(self, min_bytes: int, what: str) -> int:
        """A u64 count of things that take at least `min_bytes` each."""
        count = int(self.scalar(_U64))
        if count > (self.size - self.at) // min_bytes:
            raise self.error(
                f"truncated or corrupt: {count} {what} can't fit into a file of {self.size} bytes"
            )
        return count

    def name(self, what: str) -> str:
        length = int(self.scalar(_U64))
        if length > MAX_NAME:
            raise self.error(f"corrupt: a {what} of {length} bytes (at most {MAX_NAME})")
        start = self.take(length)
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"corrupt: a {what} that isn't UTF-8, at byte {start}") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.strings(1)[0]
        if kind != _ARRAY or depth == MAX_NESTING:
            raise self.error(f"corrupt: metadata {key!r} has the unknown value type {kind}")
        item = int(self.scalar(_U32))
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item].format)
            count = self.count(dtype.itemsize, f"values of {key!r}")
            return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()
        if item == _STRING:
            return self.strings(self.count(8, f"strings of {key!r}"))
        return [self.value(item, key, depth + 1) for _ in range(self.count(12, f"arrays of {key!r}"))]

    def strings(self, count: int) -> list[str]:
        """`count` strings; a loop of its own because a vocabulary has hundreds of thousands."""
        data, at, size, read_length = self.data, self.at, self.size, _U64.unpack_from
        out = []
        for _ in range(count):
            start = at + 8
            if start > size:
                raise self.error(f"truncated or corrupt: a string starts at {at}, file ends at {size}")
            at = start + read_length(data, at)[0]
            if at > size:
                raise self.error(
                    f"truncated or corrupt: a string of {at - start} bytes at {start}, file ends at {size}"
                )
            out.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return out

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.name("tensor name")
        rank = int(self.scalar(_U32))
        if rank > MAX_RANK:
            raise self.error(f"corrupt: tensor {name!r} has {rank} dimensions (at most {MAX_RANK})")
        shape = tuple(int(self.scalar(_U64)) for _ in range(rank))[::-1]
        return name, shape, int(self.scalar(_U32)), int(self.scalar(_U64))

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value % 8:
            raise self.error(f"corrupt: general.alignment is {value!r}, not a positive multiple of 8")
        return value

    def resolve(self, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> list[TensorInfo]:
        """Turn table rows into absolute places, all of them inside the file."""
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in rows:
            if name in tensors:
                raise self.error(f"tensor {name!r} appears twice")
            if type_id not in GGML_TYPES:
                raise self.error(f"tensor {name!r} has the unknown ggml type {type_id}")
            type_name, block, block_bytes = GGML_TYPES[type_id]
            row = shape[-1] if shape else 1
            if row % block:
                raise self.error(
                    f"tensor {name!r}: rows of {row} are no multiple of {type_name}'s block, {block}"
                )
            nbytes = math.prod(shape) // block * block_bytes
            if offset % alignment or start + offset + nbytes > self.size:
                raise self.error(
                    f"truncated or corrupt: tensor {name!r} takes {nbytes} bytes at {start + offset}, "
                    f"the file ends at {self.size}"
                )
            tensors[name] = TensorInfo(name, shape, type_id, type_name, start + offset, nbytes)
        return list(tensors.values())
