"""A Hugging Face config.json, as transformers 4 or 5 writes it, as a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from worker.model.config import (
    Architecture,
    Fields,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    UnsupportedModel,
    token_ids,
)

# Hugging Face model class -> architecture. Mistral's layers are Llama's with a sliding window.
HF_ARCHITECTURES: Final[dict[str, Architecture]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Phi3ForCausalLM": "phi3",
}
_MODEL_TYPES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json as transformers 4 or 5 writes it. Raises UnsupportedModel."""
    name = _class(config)
    architecture = HF_ARCHITECTURES[name]
    _refuse(config)
    fields = Fields(config)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden // heads if hidden % heads == 0 else None)
    all_heads = (
        heads if architecture in ("llama", "phi3") else None
    )  # what a missing num_key_value_heads means
    llama_bias = name == "LlamaForCausalLM" and bool(config.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", all_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(config, fields, head_dim, architecture),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=llama_bias or architecture == "qwen2",
        output_bias=llama_bias,
        sliding_window=_window(config, fields, name),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        torch_dtype=_dtype(config),
    )


def _class(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [
        _MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))
    ]
    name = named[0] if isinstance(named, list) else named
    if not isinstance(name, str) or name not in HF_ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {name!r} is not supported; supported: {', '.join(HF_ARCHITECTURES)}"
        )
    return name


def _refuse(config: Mapping[str, Any]) -> None:
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModel(
            f"quantization_config ({method}) is not supported yet; use the unquantised model or a GGUF"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is not supported")


def _window(config: Mapping[str, Any], fields: Fields, name: str) -> int | None:
    if name == "LlamaForCausalLM":
        return None  # the class has no such field and ignores it
    unused = name == "Qwen2ForCausalLM" and not config.get("use_sliding_window")
    if unused or config.get("sliding_window", 0) is None:
        return None
    defaults = {"MistralForCausalLM": 4096, "Qwen2ForCausalLM": 4096, "Phi3ForCausalLM": 0}
    window = fields.integer("sliding_window", defaults[name], low=0) or None
    if name != "Qwen2ForCausalLM":
        return window
    layers = fields.integer("num_hidden_layers")
    first_sliding = fields.integer("max_window_layers", 28, low=0)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        full = all(kind == "full_attention" for kind in kinds)
        sliding = all(kind == "sliding_attention" for kind in kinds)
    else:
        full, sliding = first_sliding >= layers, first_sliding == 0
    if full == sliding:
        raise UnsupportedModel("sliding-window and full attention mixed over the layers is not supported")
    return window if sliding else None


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: float32, float16, bfloat16")
    return dtype


def _rope(config: Mapping[str, Any], fields: Fields, head_dim: int, architecture: Architecture) -> RopeConfig:
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping) or any(isinstance(v, Mapping) for v in values.values()):
        raise UnsupportedModel("rope_parameters that differ by layer are not supported")
    defaults = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    rope = Fields({**defaults, **values}, "rope ")
    partial = rope.number("partial_rotary_factor", 1.0)
    if partial != 1.0 and architecture != "phi3":
        raise UnsupportedModel(
            f"partial_rotary_factor {partial} is supported for phi3 only, not {architecture}"
        )
    return RopeConfig(
        rope.number("rope_theta", 10_000.0), int(head_dim * partial), _scaling(rope, fields, architecture)
    )


def _scaling(rope: Fields, fields: Fields, architecture: Architecture) -> RopeScaling | None:
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    max_position = fields.integer("max_position_embeddings")
    # A value beside the rope parameters wins over one inside, as in transformers.
    inside = rope.integer("original_max_position_embeddings", max_position, low=2)
    original = fields.integer("original_max_position_embeddings", inside, low=2)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"rope low_freq_factor ({low}) must be below high_freq_factor ({high})")
        return Llama3Scaling(rope.number("factor"), low, high, original)
    if kind == "longrope" or (kind == "su" and architecture == "phi3"):
        if "short_mscale" in rope.values or "long_mscale" in rope.values:
            raise UnsupportedModel("longrope with short_mscale and long_mscale is not supported")
        factor = rope.number("factor", max_position / original)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return LongRopeScaling(
            rope.numbers("short_factor"),
            rope.numbers("long_factor"),
            original,
            rope.number("attention_factor", attention),
        )
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: linear, llama3, longrope")
