"""Logits in 16 bits: no further from float32 than 1.5 times what the same layers in plain torch are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import AttentionBatch
from worker.model.config import ModelConfig
from worker.model.hf_config import config_from_hf
from worker.model.layers import CausalLM
from worker.runner.kv_cache import KvCache

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE = 16
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 20000, "max_position_embeddings": 1024, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0,
}  # fmt: skip


def model(dtype: torch.dtype) -> CausalLM:
    torch.manual_seed(0)
    made = CausalLM(config_from_hf(CONFIG), dtype=dtype, device=CUDA, max_model_len=1024)
    for name, parameter in made.named_parameters.items():
        scale = 1.0 if "embedding" in name else 3.0 * parameter.shape[-1] ** -0.5
        values = (
            1 + 0.2 * torch.randn_like(parameter) if "norm" in name else torch.randn_like(parameter) * scale
        )
        parameter.copy_(values)
    return made


def plain(source: CausalLM, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits of the last of tokens [B, S], by torch alone."""
    config: ModelConfig = source.config
    named = {name: value.to(dtype) for name, value in source.named_parameters.items()}
    length, dim, half = tokens.shape[1], config.head_dim, config.head_dim // 2
    cos, sin = source.cos_sin[:length].to(dtype).split(half, 1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.split(half, 3)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 3)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (config.hidden_size,), named[name], config.rms_norm_eps)

    x = F.embedding(tokens, named["embedding.weight"])
    for i in range(config.num_layers):
        at = f"layers.{i}."
        qkv = F.linear(norm(x, at + "input_norm.weight"), named[at + "qkv.weight"], named[at + "qkv.bias"])
        heads = qkv.view(*tokens.shape, -1, dim).transpose(1, 2)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + F.linear(out.transpose(1, 2).flatten(2), named[at + "output.weight"])
        gate, up = F.linear(norm(x, at + "mlp_norm.weight"), named[at + "gate_up.weight"]).chunk(2, 2)
        x = x + F.linear(F.silu(gate) * up, named[at + "down.weight"])
    return F.linear(norm(x, "final_norm.weight")[:, -1], named["lm_head.weight"])


def paged(source: CausalLM, tokens: Tensor) -> Tensor:
    """The same through the cache: a step of prompts, then a step in which all decode."""
    count, length = tokens.shape
    pages = -(-length // PAGE)
    cache = KvCache(
        source.config, count * pages + 1, PAGE, source.named_parameters["lm_head.weight"].dtype, CUDA
    )
    tables = (torch.randperm(count * pages, device=CUDA) + 1).int().view(count, pages)
    positions = torch.arange(length, device=CUDA).repeat(count, 1)
    slots = tables.long().gather(1, positions // PAGE) * PAGE + positions % PAGE

    def step(first: int, last: int) -> Tensor:
        size = last - first
        batch = AttentionBatch(
            positions=positions[:, first:last].flatten().contiguous(),
            slots=slots[:, first:last].flatten().contiguous(),
            block_tables=tables,
            seq_lens=torch.full((count,), last, dtype=torch.int32, device=CUDA),
            query_starts=torch.arange(0, count * size + 1, size, dtype=torch.int32, device=CUDA),
            num_decodes=count if size == 1 else 0,
            max_query_len=size,
            max_seq_len=last,
        )
        return source.forward(tokens[:, first:last].flatten(), batch, cache.layers)

    step(0, length - 1)
    return source.compute_logits(step(length - 1, length))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("count", "length"), [(1, 700), (2, 90), (8, 300), (16, 40), (30, 70), (64, 40), (100, 30)]
)
@torch.inference_mode()
def test_error_against_float32(dtype: torch.dtype, count: int, length: int):
    source = model(dtype)
    tokens = torch.randint(20000, (count, length), device=CUDA)
    exact = plain(source, tokens, torch.float32)

    def error(logits: Tensor) -> float:
        return float((logits.float() - exact).norm() / exact.norm())

    ours, torchs = error(paged(source, tokens)), error(plain(source, tokens, dtype))
    print(f"{dtype} {count} x {length}: {ours:.5f}, plain torch {torchs:.5f}")
    assert ours <= 1.5 * torchs
