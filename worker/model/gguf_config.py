"""GGUF metadata, as llama.cpp's converters write it, as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.model.config import (
    DivisorScaling,
    Fields,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    UnsupportedModel,
    YarnScaling,
    token_ids,
    yarn_magnitude,
)
from worker.model.refusals import refuse_gguf
from worker.model.registry import ARCHITECTURES
from worker.model.tables import ArchitectureSpec


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, Sequence[float]],
) -> ModelConfig:
    """Read GGUF metadata as llama.cpp's converters write it. Raises UnsupportedModel.

    Args:
        metadata: the header's key-value pairs.
        shapes: shape of every tensor by name; tells whether embeddings are tied and projections biased.
        rope_factors: values of `rope_freqs.weight`, `rope_factors_{short,long}.weight` if there.
    """
    spec = _architecture(Fields(metadata).text("general.architecture"))
    prefix = f"{spec.gguf_name}."
    fields = Fields({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, prefix)
    refuse_gguf(fields)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{prefix}attention.value_length differs from key_length ({head_dim})")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise UnsupportedModel("no matrix token_embd.weight in the file: not a language model's weights")
    return ModelConfig(
        architecture=spec.name,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=embedding[0],
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, head_dim, rope_factors),
        max_position_embeddings=fields.integer("context_length"),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        qk_norm="blk.{i}.attn_q_norm.weight" in spec.gguf,
        sliding_window=fields.optional("attention.sliding_window", None),
        full_attention_layers=frozenset(),
        eos_token_ids=token_ids(
            [metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")]
        ),
        bos_token_id=next(iter(token_ids(metadata.get("tokenizer.ggml.bos_token_id"))), None),
        torch_dtype="bfloat16",
    )


def _architecture(name: str) -> ArchitectureSpec:
    for spec in ARCHITECTURES.values():
        if name == spec.gguf_name:
            return spec
    supported = ", ".join(dict.fromkeys(spec.gguf_name for spec in ARCHITECTURES.values()))
    raise UnsupportedModel(f"architecture {name!r:.80} is not supported; supported: {supported}")


def _rope(fields: Fields, head_dim: int, factors: Mapping[str, Sequence[float]]) -> RopeConfig:
    rot_dim = fields.integer("rope.dimension_count", head_dim)
    return RopeConfig(fields.number("rope.freq_base", 10_000.0), rot_dim, _scaling(fields, factors))


def _scaling(fields: Fields, factors: Mapping[str, Sequence[float]]) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "none")
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    magnitude = fields.number("rope.scaling.attn_factor", 1.0)
    if {"rope_factors_short.weight", "rope_factors_long.weight"} <= factors.keys() and kind in (
        "none",
        "longrope",
    ):
        short, long = (tuple(factors[f"rope_factors_{which}.weight"]) for which in ("short", "long"))
        return LongRopeScaling(short, long, original, magnitude)
    if "rope_freqs.weight" in factors and kind == "none":
        return DivisorScaling(tuple(factors["rope_freqs.weight"]))
    if kind == "none" and "rope.scale_linear" in fields.values:
        return LinearScaling(fields.number("rope.scale_linear"))
    if kind == "linear":
        return LinearScaling(fields.number("rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(fields, original, magnitude)
    if kind == "none":
        return None
    raise UnsupportedModel(
        f"GGUF rope scaling {kind!r:.40} is not supported; supported: none, linear, yarn, longrope"
    )


def _yarn(fields: Fields, original: int, magnitude: float) -> YarnScaling:
    factor = fields.number("rope.scaling.factor")
    fields.refuse("rope.scaling.yarn_ext_factor", 1)
    return YarnScaling(
        factor,
        original,
        fields.number("rope.scaling.yarn_attn_factor", yarn_magnitude(factor)) * magnitude,
        fields.number("rope.scaling.yarn_beta_fast", 32.0),
        fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
