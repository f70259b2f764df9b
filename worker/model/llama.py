"""Llama 2 to 3.3, and what is built like it (SmolLM, Yi, TinyLlama): the shared layers as they are."""

from __future__ import annotations

from worker.model.config import Fields
from worker.model.tables import ArchitectureSpec, Slot, SlotTable, Traits

HF_TENSORS: SlotTable = {
    "model.embed_tokens.weight": Slot("embedding.weight"),
    "model.layers.{i}.input_layernorm.weight": Slot("layers.{i}.input_norm.weight"),
    "model.layers.{i}.self_attn.q_proj.weight": Slot("layers.{i}.qkv.weight", "q"),
    "model.layers.{i}.self_attn.k_proj.weight": Slot("layers.{i}.qkv.weight", "k"),
    "model.layers.{i}.self_attn.v_proj.weight": Slot("layers.{i}.qkv.weight", "v"),
    "model.layers.{i}.self_attn.q_proj.bias": Slot("layers.{i}.qkv.bias", "q"),
    "model.layers.{i}.self_attn.k_proj.bias": Slot("layers.{i}.qkv.bias", "k"),
    "model.layers.{i}.self_attn.v_proj.bias": Slot("layers.{i}.qkv.bias", "v"),
    "model.layers.{i}.self_attn.o_proj.weight": Slot("layers.{i}.output.weight"),
    "model.layers.{i}.self_attn.o_proj.bias": Slot("layers.{i}.output.bias"),
    "model.layers.{i}.post_attention_layernorm.weight": Slot("layers.{i}.mlp_norm.weight"),
    "model.layers.{i}.mlp.gate_proj.weight": Slot("layers.{i}.gate_up.weight", "gate"),
    "model.layers.{i}.mlp.up_proj.weight": Slot("layers.{i}.gate_up.weight", "up"),
    "model.layers.{i}.mlp.down_proj.weight": Slot("layers.{i}.down.weight"),
    "model.norm.weight": Slot("final_norm.weight"),
    "lm_head.weight": Slot("lm_head.weight"),
}
GGUF_TENSORS: SlotTable = {
    "token_embd.weight": Slot("embedding.weight"),
    "blk.{i}.attn_norm.weight": Slot("layers.{i}.input_norm.weight"),
    "blk.{i}.attn_q.weight": Slot("layers.{i}.qkv.weight", "q", permuted=True),
    "blk.{i}.attn_k.weight": Slot("layers.{i}.qkv.weight", "k", permuted=True),
    "blk.{i}.attn_v.weight": Slot("layers.{i}.qkv.weight", "v"),
    "blk.{i}.attn_q.bias": Slot("layers.{i}.qkv.bias", "q", permuted=True),
    "blk.{i}.attn_k.bias": Slot("layers.{i}.qkv.bias", "k", permuted=True),
    "blk.{i}.attn_v.bias": Slot("layers.{i}.qkv.bias", "v"),
    "blk.{i}.attn_output.weight": Slot("layers.{i}.output.weight"),
    "blk.{i}.attn_output.bias": Slot("layers.{i}.output.bias"),
    "blk.{i}.ffn_norm.weight": Slot("layers.{i}.mlp_norm.weight"),
    "blk.{i}.ffn_gate.weight": Slot("layers.{i}.gate_up.weight", "gate"),
    "blk.{i}.ffn_up.weight": Slot("layers.{i}.gate_up.weight", "up"),
    "blk.{i}.ffn_down.weight": Slot("layers.{i}.down.weight"),
    "output_norm.weight": Slot("final_norm.weight"),
    "output.weight": Slot("lm_head.weight"),
}


def _traits(config: Fields) -> Traits:
    # A sliding_window is no field of this class: transformers ignores it.
    bias = config.flag("attention_bias")
    return Traits(attention_bias=bias, output_bias=bias)


LLAMA = ArchitectureSpec(
    name="llama",
    hf_class="LlamaForCausalLM",
    model_type="llama",
    gguf_name="llama",
    hf=HF_TENSORS,
    gguf=GGUF_TENSORS,
    traits=_traits,
    kv_heads_default=True,
)
