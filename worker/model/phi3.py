"""Phi-3, Phi-3.5 mini, Phi-4 and Phi-4-mini: query/key/value and gate/up come fused already, in our own
order; a part of each head's dimensions may be rotated, and long contexts by other factors than short ones."""

from __future__ import annotations

from worker.model.config import Fields
from worker.model.tables import ArchitectureSpec, Slot, Traits


def _traits(config: Fields) -> Traits:
    config.refuse("attention_bias")
    return Traits(sliding_window=config.optional("sliding_window", None))


PHI3 = ArchitectureSpec(
    name="phi3",
    hf_class="Phi3ForCausalLM",
    model_type="phi3",
    gguf_name="phi3",
    hf={
        "model.embed_tokens.weight": Slot("embedding.weight"),
        "model.layers.{i}.input_layernorm.weight": Slot("layers.{i}.input_norm.weight"),
        "model.layers.{i}.self_attn.qkv_proj.weight": Slot("layers.{i}.qkv.weight"),
        "model.layers.{i}.self_attn.o_proj.weight": Slot("layers.{i}.output.weight"),
        "model.layers.{i}.post_attention_layernorm.weight": Slot("layers.{i}.mlp_norm.weight"),
        "model.layers.{i}.mlp.gate_up_proj.weight": Slot("layers.{i}.gate_up.weight"),
        "model.layers.{i}.mlp.down_proj.weight": Slot("layers.{i}.down.weight"),
        "model.norm.weight": Slot("final_norm.weight"),
        "lm_head.weight": Slot("lm_head.weight"),
    },
    gguf={
        "token_embd.weight": Slot("embedding.weight"),
        "blk.{i}.attn_norm.weight": Slot("layers.{i}.input_norm.weight"),
        "blk.{i}.attn_qkv.weight": Slot("layers.{i}.qkv.weight"),
        "blk.{i}.attn_output.weight": Slot("layers.{i}.output.weight"),
        "blk.{i}.ffn_norm.weight": Slot("layers.{i}.mlp_norm.weight"),
        "blk.{i}.ffn_up.weight": Slot("layers.{i}.gate_up.weight"),
        "blk.{i}.ffn_down.weight": Slot("layers.{i}.down.weight"),
        "output_norm.weight": Slot("final_norm.weight"),
        "output.weight": Slot("lm_head.weight"),
    },
    traits=_traits,
    kv_heads_default=True,
    partial_rotary=True,
    rope_aliases={"su": "longrope", "yarn": "longrope"},  # older names of the same in this family's files
    original_max_position=4096,
)
