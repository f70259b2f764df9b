"""A Hugging Face config.json, as transformers 4 or 5 writes it, as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.model.config import Fields, ModelConfig, UnsupportedModel, token_ids
from worker.model.hf_rope import read_rope
from worker.model.refusals import refuse_hf
from worker.model.registry import ARCHITECTURES
from worker.model.tables import ArchitectureSpec


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json as transformers 4 or 5 writes it. Raises UnsupportedModel."""
    spec, headless = _architecture(config)
    fields = Fields(config)
    traits = spec.traits(fields)
    refuse_hf(fields, traits.qk_norm)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", spec.head_dim or (hidden // heads if hidden % heads == 0 else None))
    model = ModelConfig(
        architecture=spec.name,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads if spec.kv_heads_default else None),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, head_dim, spec),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=headless or fields.flag("tie_word_embeddings"),
        attention_bias=traits.attention_bias,
        output_bias=traits.output_bias,
        qk_norm=traits.qk_norm,
        sliding_window=traits.sliding_window,
        full_attention_layers=traits.full_attention_layers,
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        torch_dtype=_dtype(config),
        headless=headless,
    )
    _check_layer_types(config, model)
    return model


def _architecture(config: Mapping[str, Any]) -> tuple[ArchitectureSpec, bool]:
    """The architecture, and whether the checkpoint is its layers alone (`LlamaModel`)."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else config.get("model_type")
    for spec in ARCHITECTURES.values():
        if name == (spec.hf_class if named else spec.model_type):
            return spec, False
        if named and name == spec.hf_class.removesuffix("ForCausalLM") + "Model":
            return spec, True
    supported = ", ".join(spec.hf_class for spec in ARCHITECTURES.values())
    raise UnsupportedModel(f"architecture {name!r:.80} is not supported; supported: {supported}")


def _check_layer_types(config: Mapping[str, Any], model: ModelConfig) -> None:
    """What `layer_types` says of each layer must be what the architecture makes of it."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    count = model.num_layers
    if not isinstance(kinds, list) or len(kinds) != count:
        raise UnsupportedModel(
            f"layer_types {kinds!r:.80} must be a list of num_hidden_layers ({count}) texts"
        )
    for i, kind in enumerate(kinds):
        made = "sliding_attention" if model.window(i) else "full_attention"
        if kind != made:
            raise UnsupportedModel(
                f"layer_types has {kind!r:.40} for layer {i}, the other keys make it {made}"
            )


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(f"dtype {dtype!r:.40} is not supported; supported: float32, float16, bfloat16")
    return dtype
