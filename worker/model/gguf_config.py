"""GGUF metadata, as llama.cpp's converters write it, as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from worker.model.config import (
    Architecture,
    Fields,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    UnsupportedModel,
    token_ids,
)

GGUF_ARCHITECTURES: Final[tuple[Architecture, ...]] = ("llama", "qwen2", "phi3")


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
    architecture = Fields(metadata).text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    fields = Fields({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, prefix)
    if fields.integer("expert_count", 0, low=0):
        raise UnsupportedModel(f"{prefix}expert_count: mixtures of experts are not supported")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{prefix}attention.value_length differs from key_length ({head_dim})")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise UnsupportedModel("no matrix token_embd.weight in the file: not a language model's weights")
    return ModelConfig(
        architecture=architecture,
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
        sliding_window=fields.integer("attention.sliding_window", 0, low=0) or None,
        eos_token_ids=token_ids(
            [metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")]
        ),
        bos_token_id=next(iter(token_ids(metadata.get("tokenizer.ggml.bos_token_id"))), None),
        torch_dtype="bfloat16",
    )


def _rope(fields: Fields, head_dim: int, factors: Mapping[str, Sequence[float]]) -> RopeConfig:
    rot_dim = fields.integer("rope.dimension_count", head_dim)
    return RopeConfig(fields.number("rope.freq_base", 10_000.0), rot_dim, _scaling(fields, factors))


def _scaling(fields: Fields, factors: Mapping[str, Sequence[float]]) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "none")
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    if {"rope_factors_short.weight", "rope_factors_long.weight"} <= factors.keys() and kind in (
        "none",
        "longrope",
    ):
        short, long = (tuple(factors[f"rope_factors_{which}.weight"]) for which in ("short", "long"))
        return LongRopeScaling(short, long, original, fields.number("rope.scaling.attn_factor", 1.0))
    if "rope_freqs.weight" in factors and kind == "none":
        # llama.cpp stores Llama 3's scaling as the divisors it comes to, the same at any length.
        divisors = tuple(factors["rope_freqs.weight"])
        return LongRopeScaling(divisors, divisors, original, 1.0)
    if kind == "none" and "rope.scale_linear" in fields.values:
        return LinearScaling(fields.number("rope.scale_linear"))
    if kind == "linear":
        return LinearScaling(fields.number("rope.scaling.factor"))
    if kind == "none":
        return None
    raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear, longrope")
