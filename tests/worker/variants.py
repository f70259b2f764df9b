"""Every architecture with every variant of it: what transformers makes must come out the same here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 1000
LONGEST = 160  # tokens of a sequence
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Variant:
    """A model class and its configuration.

    gguf: llama.cpp's files can say what it is. known: so many tokens of a text for which transformers' own
    GGUF loader makes the same model of such a file; it leaves out windows and rope scalings.
    """

    model: type[PreTrainedModel]
    config: PreTrainedConfig
    max_model_len: int = LONGEST
    gguf: bool = True
    known: int = 0


def shape(hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    return {**BASE, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


def rope(kind: str, theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **values}


def llama(*sizes: int, known: int = 0, gguf: bool = True, **more: Any) -> Variant:
    return Variant(LlamaForCausalLM, LlamaConfig(**shape(*sizes, **more)), gguf=gguf, known=known)


def mistral(*sizes: int, known: int = 0, gguf: bool = True, **more: Any) -> Variant:
    return Variant(MistralForCausalLM, MistralConfig(**shape(*sizes, **more)), gguf=gguf, known=known)


def qwen2(*sizes: int, known: int = 0, gguf: bool = True, **more: Any) -> Variant:
    return Variant(Qwen2ForCausalLM, Qwen2Config(**shape(*sizes, **more)), gguf=gguf, known=known)


def qwen3(*sizes: int, known: int = 0, gguf: bool = True, **more: Any) -> Variant:
    return Variant(Qwen3ForCausalLM, Qwen3Config(**shape(*sizes, **more)), gguf=gguf, known=known)


def phi3(*sizes: int, known: int = 0, longest: int = LONGEST, **more: Any) -> Variant:
    return Variant(Phi3ForCausalLM, Phi3Config(**shape(*sizes, **more)), longest, known=known)


def longrope(pairs: int, **values: Any) -> dict[str, Any]:
    short = [1.0 + 0.02 * i for i in range(pairs)]
    return rope("longrope", short_factor=short, long_factor=[1.0 + 0.7 * i for i in range(pairs)], **values)


LLAMA3 = rope(
    "llama3",
    500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
DYNAMIC = rope("dynamic", factor=4.0)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
SLIDING = {"use_sliding_window": True, "sliding_window": 24}

VARIANTS: dict[str, Variant] = {
    "llama 3:1": llama(384, 1024, 6, 2, known=LONGEST),
    "llama tied, no grouping": llama(256, 688, 4, 4, tie_word_embeddings=True, known=LONGEST),
    "llama biases, llama3, head 128, 8:1": llama(
        256, 512, 8, 1, head_dim=128, attention_bias=True, rope_parameters=dict(LLAMA3)
    ),
    "llama linear": llama(256, 512, 4, 1, rope_parameters=rope("linear", factor=4.0)),
    "llama dynamic, short": llama(256, 512, 4, 1, gguf=False, rope_parameters=dict(DYNAMIC)),
    "llama dynamic, long": llama(
        256, 512, 4, 1, gguf=False, rope_parameters=dict(DYNAMIC), max_position_embeddings=48
    ),
    "llama yarn, head 256, 3:1": llama(384, 512, 3, 1, head_dim=256, rope_parameters=dict(YARN)),
    "mistral, head 160": mistral(256, 512, 4, 2, head_dim=160, sliding_window=None, known=LONGEST),
    "mistral window": mistral(256, 512, 4, 2, sliding_window=24, gguf=False),
    "qwen2 7:1": qwen2(448, 1024, 7, 1, known=LONGEST),
    "qwen2 tied, window": qwen2(
        256, 512, 4, 2, tie_word_embeddings=True, max_window_layers=0, gguf=False, **SLIDING
    ),
    "qwen2 yarn": qwen2(
        256, 512, 2, 1, rope_parameters={**YARN, "rope_theta": 1e6, "beta_fast": 16, "attention_factor": 1.3}
    ),
    "qwen2 windows in some layers": qwen2(256, 512, 4, 2, max_window_layers=1, gguf=False, **SLIDING),
    "qwen3, head 128, 4:1": qwen3(256, 768, 4, 1, head_dim=128, known=LONGEST),
    "qwen3 tied, biases, windows in some layers, head 80": qwen3(
        256, 512, 4, 2, head_dim=80, tie_word_embeddings=True, attention_bias=True, gguf=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], **SLIDING
    ),
    "phi3 window, head 96": phi3(384, 1024, 4, 4, sliding_window=24, known=24),
    "phi3 longrope, short, partial": phi3(
        384, 512, 4, 2, longest=128, original_max_position_embeddings=128,
        rope_parameters=longrope(36, partial_rotary_factor=0.75),
    ),
    "phi3 longrope, long, partial, tied, head 128, 3:1": phi3(
        384, 512, 3, 1, tie_word_embeddings=True, sliding_window=262144, original_max_position_embeddings=64,
        rope_parameters=longrope(48, partial_rotary_factor=0.75),
    ),
}  # fmt: skip
