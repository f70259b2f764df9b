"""Names, shapes and bytes of a model's parameters, from its configuration alone."""

from __future__ import annotations

import math

from worker.model.config import ModelConfig
from worker.model.tables import Part


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, matrices as [out, in].

    `qkv` is the query, key and value rows in this order, `gate_up` gate and up rows; tied embeddings have no
    `lm_head.weight`.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_out, qkv_out, head = config.num_heads * config.head_dim, sum(_qkv_rows(config)), (config.head_dim,)
    layer: dict[str, tuple[int, ...]] = {
        "input_norm.weight": (hidden,),
        "qkv.weight": (qkv_out, hidden),
        **({"qkv.bias": (qkv_out,)} if config.attention_bias else {}),
        **({"q_norm.weight": head, "k_norm.weight": head} if config.qk_norm else {}),
        "output.weight": (hidden, heads_out),
        **({"output.bias": (hidden,)} if config.output_bias else {}),
        "mlp_norm.weight": (hidden,),
        "gate_up.weight": (2 * inner, hidden),
        "down.weight": (hidden, inner),
    }
    return {
        "embedding.weight": (config.vocab_size, hidden),
        **{f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()},
        "final_norm.weight": (hidden,),
        **({} if config.tie_word_embeddings else {"lm_head.weight": (config.vocab_size, hidden)}),
    }


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all parameters at `itemsize` bytes an element."""
    return itemsize * sum(math.prod(shape) for shape in parameter_shapes(config).values())


def part_rows(config: ModelConfig, part: Part) -> slice:
    """Rows of a fused parameter that `part` takes."""
    if part == "all":
        return slice(None)
    if part in ("gate", "up"):
        start = 0 if part == "gate" else config.intermediate_size
        return slice(start, start + config.intermediate_size)
    q, k, v = _qkv_rows(config)
    start, size = {"q": (0, q), "k": (q, k), "v": (q + k, v)}[part]
    return slice(start, start + size)


def _qkv_rows(config: ModelConfig) -> tuple[int, int, int]:
    kv = config.num_kv_heads * config.head_dim
    return config.num_heads * config.head_dim, kv, kv
