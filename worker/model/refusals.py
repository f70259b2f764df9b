"""Keys of configurations that would change what a model computes, and that the layers know nothing of.

Such a key is refused by name unless its value is the one that changes nothing. Most come from models that
call themselves after an architecture that is served and add something of their own.
"""

from __future__ import annotations

from typing import Any, Final

from worker.model.config import Fields, UnsupportedModel

# Key -> values that change nothing, beside null and false.
_HF: Final[dict[str, tuple[Any, ...]]] = {
    "alibi": (),
    "add_cross_attention": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "attn_temperature_tuning": (0,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_encoder_decoder": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (),
    "qk_layernorm": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (),
    "rope_interleaved": (),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_alibi": (),
    "use_bidirectional_attention": (),
    "use_mrope": (),
    "use_parallel_residual": (),
}
_GGUF: Final[dict[str, tuple[Any, ...]]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (),
    "attention.scale": (),
    "attention.sliding_window_pattern": (),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (),
}
_ROPE_READ: Final = frozenset(
    {
        "rope_theta", "rope_type", "type", "partial_rotary_factor", "factor",
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
    }
)  # fmt: skip
_ROPE: Final[dict[str, tuple[Any, ...]]] = {
    "attn_factor": (1,),
    "extrapolation_factor": (1,),
    "finetuned": (True,),
}


def refuse_hf(config: Fields, qk_norm: bool) -> None:
    """Raises UnsupportedModel for a key of a config.json that can't be honoured.

    `qk_norm`: the architecture normalises queries and keys anyway, so that a key that says so is no news.
    """
    quantization = config.values.get("quantization_config")
    if quantization and not _of_the_cache_alone(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"quantization_config ({method!s:.40}) is not supported yet; use the unquantised model or a GGUF"
        )
    activation = config.values.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r:.40} is not supported; supported: silu")
    for key, neutral in _HF.items():
        config.refuse(key, *neutral)
    if config.values.get("is_causal") is False:
        raise UnsupportedModel("is_causal false: attention in both directions is not supported")
    if not qk_norm:
        config.refuse("use_qk_norm")
        config.refuse("qk_norm")


def _of_the_cache_alone(quantization: Any) -> bool:
    """As llm-compressor writes it: scales for a KV cache of 8 bits, and weights as they were."""
    known = isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors"
    return known and bool(quantization.get("kv_cache_scheme")) and quantization.get("config_groups") == {}


def refuse_gguf(fields: Fields) -> None:
    """Raises UnsupportedModel for a key of GGUF metadata that can't be honoured."""
    if fields.integer("expert_count", 0, low=0):
        raise UnsupportedModel(f"{fields.prefix}expert_count: mixtures of experts are not supported")
    for key, neutral in _GGUF.items():
        fields.refuse(key, *neutral)
    if fields.values.get("attention.causal") is False:
        raise UnsupportedModel(
            f"{fields.prefix}attention.causal false: attention in both directions is not supported"
        )


def refuse_rope(rope: Fields) -> None:
    """Raises UnsupportedModel for a rope parameter that isn't known."""
    for key in rope.values:
        if key not in _ROPE_READ:
            rope.refuse(key, *_ROPE.get(key, ()))
