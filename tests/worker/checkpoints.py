"""Small random checkpoints of each family, as transformers saves them and as llama.cpp converts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.worker.gguf_files import write_gguf
from worker.model.hf_config import config_from_hf
from worker.model.registry import ARCHITECTURES
from worker.model.shapes import parameter_shapes, part_rows

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "phi3": "Phi3ForCausalLM"}


def small_config(arch: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [CLASSES[arch]],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 1100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **changes,
    }


def hf_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """A random tensor for every name transformers would save."""
    model = config_from_hf(config)
    shapes = parameter_shapes(model)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for pattern, slot in ARCHITECTURES[model.architecture].hf.items():
        for layer in range(model.num_layers if "{i}" in pattern else 1):
            shape = shapes.get(slot.parameter.replace("{i}", str(layer)))
            if shape is not None:
                rows = len(range(*part_rows(model, slot.part).indices(shape[0])))
                tensors[pattern.replace("{i}", str(layer))] = torch.randn(
                    rows, *shape[1:], generator=generator
                )
    return tensors


def save_hf(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows in llama.cpp's order: of each head, the two halves interleaved."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2)).reshape(
        rows.shape
    )


def save_gguf(path: Path, arch: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """F32, named by the gguf library's own table."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "phi3": gguf.MODEL_ARCH.PHI3}[
        arch
    ]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    out = {}
    for name, tensor in tensors.items():
        rows = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            rows = permuted(rows, heads)
        if arch == "llama" and ".k_proj." in name:
            rows = permuted(rows, kv_heads)
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = rows
    return write_gguf(path, arch, gguf_metadata(arch, config), out)


def gguf_metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
    }
