"""How a checkpoint's tensors map onto ours: the vocabulary of the tables in llama, qwen2 and phi3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Part = Literal["all", "q", "k", "v", "gate", "up"]


class Slot(NamedTuple):
    """Where one checkpoint tensor goes.

    parameter: our name of it; `{i}` stands for the layer number, as in the checkpoint's name.
    part: which rows of it: query, key or value rows of `qkv`, gate or up rows of `gate_up`, or all of it.
    permuted: rows are in llama.cpp's order (each head's rotated pairs side by side) and must be put back.
    """

    parameter: str
    part: Part = "all"
    permuted: bool = False


SlotTable = Mapping[str, Slot]


class CheckpointLayout(NamedTuple):
    """Tensor tables of one architecture: Hugging Face names (safetensors) and llama.cpp names (GGUF)."""

    hf: SlotTable
    gguf: SlotTable
