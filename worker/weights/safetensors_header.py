"""Which safetensors files make up a model, and their headers: checked without torch and without the weights.

Layout (huggingface/safetensors, README): the header's length u64, little-endian; the header, a JSON object
from tensor names to `dtype`, `shape` and `data_offsets` (first byte and the one after the last, counted from
the header's end), and `__metadata__`; then the tensors without a gap up to the end of the file.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from worker.weights.source import SAFETENSORS_INDEX, SourceError, read_json

MAX_HEADER: Final = 100_000_000  # bytes; the library reads no longer one
_LENGTH: Final = 8
_ITEM_BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Shape = Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=64)]  # torch's most


class TensorEntry(msgspec.Struct, frozen=True):
    """What a header says of a tensor; shape outermost first, offsets in bytes."""

    dtype: str
    shape: _Shape
    data_offsets: tuple[_Natural, _Natural]


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


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the file at `path` by name.

    Raises:
        SourceError: it is no safetensors file, truncated, or inconsistent in itself; the message names it.
    """
    try:
        if not path.is_file():  # who opens a pipe waits
            raise SourceError(f"{path}: it is no file; needed is a safetensors file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or length > MAX_HEADER:
                raise SourceError(
                    f"{path}: not a safetensors file (its first {_LENGTH} bytes are the length of a header "
                    f"of at most {MAX_HEADER} bytes); fetch or convert it again"
                )
            if _LENGTH + length > size:
                raise _truncated(path, _LENGTH + length, size)
            header = file.read(length)
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}") from error
    tensors = _decoded(path, header)
    end = _check_places(path, tensors)
    if (needed := _LENGTH + length + end) > size:
        raise _truncated(path, needed, size)
    if needed < size:
        raise SourceError(f"{path}: {size - needed} bytes follow the last tensor; fetch or convert it again")
    return tensors


def _decoded(path: Path, header: bytes) -> dict[str, TensorEntry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        return {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: its header isn't that of a safetensors file ({error}); fetch or convert it again"
        ) from None


def _check_places(path: Path, tensors: dict[str, TensorEntry]) -> int:
    """Where the last tensor ends. SourceError when they don't follow each other, or aren't of their sizes."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        first, last = tensor.data_offsets
        bits = _ITEM_BITS.get(tensor.dtype)
        if first != end or bits is None or math.prod(tensor.shape) * bits != (last - first) * 8:
            what = f"{tensor.dtype}, {list(tensor.shape)}"
            raise SourceError(
                f"{path}: tensor {name:.80} ({what:.120}) can't have the bytes {first} to {last}; "
                "fetch or convert it again"
            )
        end = last
    return end


def _truncated(path: Path, needed: int, size: int) -> SourceError:
    return SourceError(
        f"{path}: truncated: its header tells of {needed} bytes, and the file has {size}; "
        "fetch or copy it again"
    )
