"""From checkpoint tensors to parameters: where each goes, and that every one arrives exactly once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from worker.model.config import ModelConfig
from worker.model.shapes import part_rows
from worker.model.tables import Slot, SlotTable
from worker.weights.source import SourceError

# What checkpoints carry beside parameters: tables of the rotary embedding, which we make ourselves, and
# scales for a KV cache of 8 bits. Ours has a scale of 1, see kernels/cache_types.py.
_EXTRAS: Final = re.compile(
    r".*rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_(short|long)\.weight"
    r"|.*self_attn\.((attn|[qkv]_proj|qkv_proj)\.)?(q|k|v|kv|prob|output)_scale"
)
_NAMED = 8  # names listed in an error


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def read_into(self, target: Tensor) -> None:
        """Copy the values, in order, into `target`: as many elements, of any dtype, device and strides."""


class Target(NamedTuple):
    shape: tuple[int, ...]
    view: Tensor


class Targets:
    """The parameters of a model as views by checkpoint name; `fill` each, then `finish`."""

    def __init__(
        self, config: ModelConfig, parameters: Mapping[str, Tensor], table: SlotTable, path: Path
    ) -> None:
        self.path = path
        self.waiting: dict[str, Target] = {}
        self.filled: set[str] = set()
        # Checkpoints with tied embeddings may carry the matrix twice; the embedding's is the one that counts.
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        self.ignored = {name for name, slot in table.items() if slot.parameter in tied}
        for pattern, slot in table.items():
            for layer in range(config.num_layers if "{i}" in pattern else 1):
                parameter = parameters.get(slot.parameter.replace("{i}", str(layer)))
                if parameter is not None:
                    name = pattern.replace("{i}", str(layer))
                    self.waiting[name] = _target(config, parameter, slot)

    def fill(self, tensor: CheckpointTensor) -> None:
        """Read `tensor` into its parameter. Raises SourceError: unexpected, there twice, or a wrong shape."""
        name = tensor.name
        target = self.waiting.pop(name, None)
        if target is None:
            if name in self.filled:
                raise SourceError(f"{self.path}: tensor {name} is there twice")
            if name not in self.ignored and not _EXTRAS.fullmatch(name):
                raise SourceError(f"{self.path}: unexpected tensor {name} {list(tensor.shape)}")
            return
        if tensor.shape != target.shape:
            raise SourceError(
                f"{self.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
            )
        tensor.read_into(target.view)
        self.filled.add(name)

    def finish(self) -> None:
        """Raises SourceError naming what never came."""
        if self.waiting:
            names = list(self.waiting)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise SourceError(
                f"{self.path}: {len(names)} tensors are missing: {', '.join(names[:_NAMED])}{more}"
            )


def _target(config: ModelConfig, parameter: Tensor, slot: Slot) -> Target:
    rows = parameter[part_rows(config, slot.part)]
    shape = tuple(rows.shape)
    if slot.permuted:
        # Ours: [head, half, pair]; llama.cpp's: [head, pair, half]. The same rows, seen in the file's order.
        rows = rows.view(-1, 2, config.head_dim // 2, *shape[1:]).transpose(1, 2)
    return Target(shape, rows)
