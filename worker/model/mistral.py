"""Mistral: Llama's tensors, no biases, and in some versions a sliding window in every layer.

llama.cpp calls it llama, and its GGUF files don't say how wide the window is.
"""

from __future__ import annotations

from worker.model.config import Fields
from worker.model.llama import GGUF_TENSORS, HF_TENSORS
from worker.model.tables import ArchitectureSpec, Traits

_WINDOW = 4096  # of a config.json that doesn't say; null says none


def _traits(config: Fields) -> Traits:
    config.refuse("attention_bias")
    return Traits(sliding_window=config.optional("sliding_window", _WINDOW))


MISTRAL = ArchitectureSpec(
    name="mistral",
    hf_class="MistralForCausalLM",
    model_type="mistral",
    gguf_name="llama",
    hf=HF_TENSORS,
    gguf=GGUF_TENSORS,
    traits=_traits,
)
