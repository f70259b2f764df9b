"""Qwen3 (dense): Qwen2's layers with each head's query and key normalised; biases where asked for."""

from __future__ import annotations

from worker.model.config import Fields
from worker.model.llama import HF_TENSORS
from worker.model.qwen2 import GGUF_TENSORS, qwen_window
from worker.model.tables import ArchitectureSpec, Slot, Traits


def _traits(config: Fields) -> Traits:
    bias = config.flag("attention_bias")
    window, full = qwen_window(config)
    return Traits(bias, bias, qk_norm=True, sliding_window=window, full_attention_layers=full)


QWEN3 = ArchitectureSpec(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    model_type="qwen3",
    gguf_name="qwen3",
    hf={
        **HF_TENSORS,
        "model.layers.{i}.self_attn.q_norm.weight": Slot("layers.{i}.q_norm.weight"),
        "model.layers.{i}.self_attn.k_norm.weight": Slot("layers.{i}.k_norm.weight"),
    },
    gguf={
        **GGUF_TENSORS,
        "blk.{i}.attn_q_norm.weight": Slot("layers.{i}.q_norm.weight"),
        "blk.{i}.attn_k_norm.weight": Slot("layers.{i}.k_norm.weight"),
    },
    traits=_traits,
    head_dim=128,
)
