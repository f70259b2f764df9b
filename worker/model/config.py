"""What a model is: one frozen description, whatever file it came from (hf_config, gguf_config read them).

Whatever the layers can't compute is refused here, by name: a model that answers wrongly is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

Architecture = Literal["llama", "qwen2", "phi3"]

_MAX_INTEGER: Final = 2**31 - 1
_MAX_NUMBER: Final = 1e30


class UnsupportedModel(ValueError):
    """The model asks for something that can't be computed here; the message names it."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """One divisor per frequency (LongRoPE, arXiv 2402.13753): `short` for contexts up to the original length,
    `long` beyond; cosines and sines are multiplied by `attention_factor`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`, over the first `rot_dim` of each head's dimensions."""

    theta: float
    rot_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only model.

    `attention_bias` is a bias on the query, key and value projections, `output_bias` one on the attention's
    output projection. `sliding_window` W lets a token see itself and W - 1 before it; None: all before it.
    `torch_dtype` is the checkpoint's own ("float32", "float16" or "bfloat16").
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
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str

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
        scaling = self.rope.scaling
        if isinstance(scaling, LongRopeScaling):
            for name, factors in (("short_factor", scaling.short), ("long_factor", scaling.long)):
                if len(factors) != rot_dim // 2:
                    raise UnsupportedModel(f"rope {name} has {len(factors)} values, not {rot_dim // 2}")


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
    """Checked reading of numbers: a null counts as absent, an error names the key."""

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
