"""A model of transformers as llama.cpp's converter writes it: F32 GGUF, its metadata, its order of rows.

Written after conversion/{base,llama,qwen,phi}.py of ggml-org/llama.cpp; names of tensors and keys are the
gguf library's. What the converter leaves out (windows of Mistral and Qwen, dynamic NTK) is left out here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.worker.checkpoints import permuted

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


def convert(model: PreTrainedModel, path: Path) -> Path:
    """Write `model` to `path`."""
    path.parent.mkdir(exist_ok=True)
    config = model.config
    kind = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_name(f"Random {config.model_type}")
    _common(writer, config)
    if config.model_type == "phi3":
        _phi3(writer, config)
    else:
        _scaling(writer, config)
    for name, values in _tensors(model, kind):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _common(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type in ("llama", "mistral"):
        writer.add_rope_dimension_count(head_dim)


def _scaling(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for key, add in {
                "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
                "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
                "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
            }.items():
                if rope.get(key) is not None:
                    add(rope[key])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config.head_dim))


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _phi3(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    original = config.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        scale = config.max_position_embeddings / original
        attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(attention)
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def _tensors(model: PreTrainedModel, kind: gguf.MODEL_ARCH) -> list[tuple[str, np.ndarray]]:
    config = model.config
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    found = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor.to(torch.float32).numpy()
        for part, count in heads.items():
            if kind == gguf.MODEL_ARCH.LLAMA and part in name:
                rows = permuted(rows, count)
        found.append((names.get_name(name, try_suffixes=(".weight", ".bias")), rows))
    return found
