"""Rope parameters of a config.json: `rope_parameters` as transformers 5 writes them, or `rope_theta` and
`rope_scaling` as 4 did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from worker.model.config import (
    DynamicScaling,
    Fields,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    UnsupportedModel,
    YarnScaling,
    yarn_magnitude,
)
from worker.model.refusals import refuse_rope
from worker.model.tables import ArchitectureSpec

SUPPORTED: Final = "linear, dynamic, yarn, llama3, longrope"


def read_rope(config: Fields, head_dim: int, spec: ArchitectureSpec) -> RopeConfig:
    """The rotary embedding of a model with heads of `head_dim` dimensions. Raises UnsupportedModel."""
    new, old = config.values.get("rope_parameters"), config.values.get("rope_scaling")
    if new and old and new != old:
        raise UnsupportedModel(
            "rope_parameters and rope_scaling are both there and differ: keep the one you mean"
        )
    values = new or old or {}
    if not isinstance(values, Mapping) or any(isinstance(v, Mapping) for v in values.values()):
        raise UnsupportedModel("rope_parameters that differ by layer are not supported")
    beside = ("rope_theta", "partial_rotary_factor")
    defaults = {key: config.values[key] for key in beside if config.values.get(key) is not None}
    rope = Fields({**defaults, **values}, "rope ")
    scaling = _scaling(rope, config, spec)
    refuse_rope(rope)
    partial = rope.number("partial_rotary_factor", 1.0)
    if partial != 1.0 and not spec.partial_rotary:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported for {spec.hf_class}")
    return RopeConfig(rope.number("rope_theta", 10_000.0), int(head_dim * partial), scaling)


def _scaling(rope: Fields, config: Fields, spec: ArchitectureSpec) -> RopeScaling | None:
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    kind = spec.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "dynamic":
        return DynamicScaling(rope.number("factor"), config.integer("max_position_embeddings", low=2))
    if kind == "yarn":
        return _yarn(rope, config, spec)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"rope low_freq_factor ({low}) must be below high_freq_factor ({high})")
        return Llama3Scaling(rope.number("factor"), low, high, _original(rope, config, spec))
    if kind == "longrope":
        return _longrope(rope, config, spec)
    raise UnsupportedModel(f"rope scaling {kind!r:.40} is not supported; supported: {SUPPORTED}")


def _original(rope: Fields, config: Fields, spec: ArchitectureSpec) -> int:
    """The length before stretching. A value beside the rope parameters wins over one inside, and so does an
    architecture's own default, as in transformers."""
    if spec.original_max_position is not None:
        return config.integer("original_max_position_embeddings", spec.original_max_position, low=2)
    key = "original_max_position_embeddings"
    inside = rope.integer(key, config.integer("max_position_embeddings"), low=2)
    return config.integer(key, inside, low=2)


def _yarn(rope: Fields, config: Fields, spec: ArchitectureSpec) -> YarnScaling:
    original = _original(rope, config, spec)
    longest = config.integer("max_position_embeddings")
    factor = rope.number("factor", longest / original if longest > original else None)
    attention = yarn_magnitude(factor)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention = yarn_magnitude(factor, rope.number("mscale"))
        attention /= yarn_magnitude(factor, rope.number("mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        rope.number("attention_factor", attention),
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        rope.flag("truncate", True),
    )


def _longrope(rope: Fields, config: Fields, spec: ArchitectureSpec) -> LongRopeScaling:
    original = _original(rope, config, spec)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        rope.numbers("short_factor"),
        rope.numbers("long_factor"),
        original,
        rope.number("attention_factor", attention),
    )
