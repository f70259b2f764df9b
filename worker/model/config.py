"""What a model is: one frozen description, whatever file it came from (hf_config, gguf_config read them).

Whatever the layers can't compute is refused here, by name: a model that answers wrongly is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "phi3"]

_MAX_INTEGER: Final = 2**31 - 1
_MAX_NUMBER: Final = 1e30


class UnsupportedModel(ValueError):
    """The model asks for something that can't be computed here; the message names it."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: up to the original length nothing changes; for longer sequences the base grows with the
    length they may get."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies that turn less than `beta_slow` times within the original length
    are divided by `factor`, those that turn more than `beta_fast` times kept, a ramp between, whose ends are
    whole numbers if `truncate`; cosines and sines are multiplied by `attention_factor`."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """One divisor per frequency, at any length: how llama.cpp stores Llama 3's scaling."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """One divisor per frequency (LongRoPE, arXiv 2402.13753): `short` for sequences up to the original
    length, `long` for those that may get longer; cosines and sines are multiplied by `attention_factor`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling | DivisorScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`, over the first `rot_dim` of each head's dimensions."""

    theta: float
    rot_dim: int
    scaling: RopeScaling | None = None

    @property
    def switch(self) -> int | None:
        """Sequences that may get longer than this are rotated by other frequencies; None: all by the same."""
        scaling = self.scaling
        return (
            scaling.original_max_position if isinstance(scaling, DynamicScaling | LongRopeScaling) else None
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only model.

    `attention_bias` is a bias on the query, key and value projections, `output_bias` one on the attention's
    output projection; `qk_norm`: each head's query and key are normalised before they are rotated.
    `sliding_window` W lets a token see itself and W - 1 before it, but in `full_attention_layers`; None: all
    before it in every layer.
    `torch_dtype` is the checkpoint's own ("float32", "float16" or "bfloat16").
    `headless`: the checkpoint is the layers alone, as embedding models are saved: tensors are named without
    `model.`, and there is no output layer (the embeddings stand in for it).
    """

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    sliding_window: int | None
    full_attention_layers: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str
    headless: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} key/value heads"
            )
        rot_dim = self.rope.rot_dim
        if rot_dim % 2 or not 0 < rot_dim <= self.head_dim:
            raise UnsupportedModel(
                f"{rot_dim} rotary dimensions: must be even, 2 to head_dim ({self.head_dim})"
            )
        if isinstance(self.rope.scaling, DynamicScaling) and rot_dim < 4:
            raise UnsupportedModel(f"dynamic rope scaling needs 4 rotary dimensions, not {rot_dim}")
        if isinstance(self.rope.scaling, YarnScaling) and self.rope.theta <= 1:
            raise UnsupportedModel(f"yarn rope scaling needs a rope_theta above 1, not {self.rope.theta}")
        for name, factors in _factors(self.rope.scaling):
            if len(factors) != rot_dim // 2:
                raise UnsupportedModel(f"rope {name} has {len(factors)} values, not {rot_dim // 2}")

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer sees, itself included; 0: all before it."""
        return 0 if layer in self.full_attention_layers else self.sliding_window or 0

    @property
    def leading_layers(self) -> int:
        """How many layers, from the first on, launch every kernel that all of them launch: those of another
        window are compiled for it."""
        windows = [self.window(layer) for layer in range(self.num_layers)]
        return 1 + max(map(windows.index, set(windows)))

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence: `max_position_embeddings`, or what the rope scaling makes of it.

        Linear and dynamic scaling stretch `max_position_embeddings`, YaRN its original length; the others'
        `max_position_embeddings` is the stretched length already.
        """
        positions, scaling = self.max_position_embeddings, self.rope.scaling
        match scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                return max(positions, int(positions * factor))
            case YarnScaling(factor, original):
                return max(positions, int(original * factor))
            case _:
                return positions


def _factors(scaling: RopeScaling | None) -> list[tuple[str, tuple[float, ...]]]:
    match scaling:
        case LongRopeScaling(short, long):
            return [("short_factor", short), ("long_factor", long)]
        case DivisorScaling(divisors):
            return [("rope_freqs", divisors)]
        case _:
            return []


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """By how much YaRN makes cosines and sines larger, if nothing else is said (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def kv_page_bytes(config: ModelConfig, page_size: int, itemsize: int) -> int:
    """Bytes one KV page takes over all layers: keys and values of `page_size` tokens, `itemsize` bytes an
    element."""
    return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * itemsize


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as configurations spell it (an id, a list, or null) as a tuple without duplicates."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(
        dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    )


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER


class Fields:
    """Checked reading of a configuration: a null counts as absent, an error names the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self.prefix = values, prefix

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_INTEGER:
            raise UnsupportedModel(f"{self.prefix}{key} must be a whole number from {low}, not {value!r:.80}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not _is_positive(value):
            raise UnsupportedModel(f"{self.prefix}{key} must be a positive number, not {value!r:.80}")
        return float(value)

    def optional(self, key: str, default: int | None) -> int | None:
        """A whole number; None for null and 0, which both say that there is none."""
        if self.values.get(key, 0) is None:
            return None
        return self.integer(key, default or 0, low=0) or None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.prefix}{key} must be true or false, not {value!r:.80}")
        return value

    def refuse(self, key: str, *neutral: Any) -> None:
        """Raises UnsupportedModel if `key` has a value that would change what the model computes: any but
        null, false and the `neutral` ones."""
        value = self.values.get(key)
        known = isinstance(value, (int, float, str, list)) and value in neutral
        if value is not None and value is not False and not known:
            raise UnsupportedModel(f"{self.prefix}{key} {value!r:.80} is not supported")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise UnsupportedModel(f"{self.prefix}{key} must be a text, not {value!r}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self.values.get(key)
        if not isinstance(values, list) or not all(_is_positive(v) for v in values):
            raise UnsupportedModel(f"{self.prefix}{key} must be a list of positive numbers")
        return tuple(float(v) for v in values)
