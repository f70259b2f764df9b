"""What an architecture adds to the shared layers: the vocabulary of llama, mistral, qwen2, qwen3 and phi3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from worker.model.config import Architecture, Fields

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


class Traits(NamedTuple):
    """What a config.json says about the layers in words that differ between architectures; the meaning is
    that of ModelConfig's fields."""

    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ArchitectureSpec:
    """One architecture: its names, where its checkpoints' tensors go, and how to read its config.json.

    hf_class, model_type: what config.json calls it. gguf_name: what GGUF metadata calls it.
    hf, gguf: tensor tables by Hugging Face's names (safetensors) and by llama.cpp's (GGUF).
    traits: reads what only this architecture spells so.
    head_dim: of a config.json without it; None: hidden size over heads.
    kv_heads_default: a config.json without `num_key_value_heads` means as many as there are heads.
    partial_rotary: `partial_rotary_factor` is honoured.
    rope_aliases: other names of rope types. original_max_position: of a config.json without it.
    """

    name: Architecture
    hf_class: str
    model_type: str
    gguf_name: str
    hf: SlotTable
    gguf: SlotTable
    traits: Callable[[Fields], Traits]
    head_dim: int | None = None
    kv_heads_default: bool = False
    partial_rotary: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    original_max_position: int | None = None
