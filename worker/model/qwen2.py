"""Qwen2 and Qwen2.5: Llama's tensors, always with a bias on queries, keys and values.

llama.cpp rotates this family in halves as its authors do, so nothing is permuted in its GGUF files.
"""

from __future__ import annotations

from worker.model.config import Fields
from worker.model.llama import GGUF_TENSORS as LLAMA_GGUF
from worker.model.llama import HF_TENSORS
from worker.model.tables import ArchitectureSpec, SlotTable, Traits

GGUF_TENSORS: SlotTable = {name: slot._replace(permuted=False) for name, slot in LLAMA_GGUF.items()}
_WINDOW = 4096  # of a config.json that doesn't say; null says none
_FIRST_SLIDING = 28


def qwen_window(config: Fields) -> tuple[int | None, frozenset[int]]:
    """The sliding window, and the layers without it: those that `layer_types` says, else the first
    `max_window_layers`."""
    window = config.optional("sliding_window", _WINDOW) if config.flag("use_sliding_window") else None
    if window is None:
        return None, frozenset()
    layers, kinds = config.integer("num_hidden_layers"), config.values.get("layer_types")
    if isinstance(kinds, list):
        full = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    else:
        full = frozenset(range(min(layers, config.integer("max_window_layers", _FIRST_SLIDING, low=0))))
    return (None, frozenset()) if len(full) == layers else (window, full)


def _traits(config: Fields) -> Traits:
    window, full = qwen_window(config)
    return Traits(attention_bias=True, sliding_window=window, full_attention_layers=full)


QWEN2 = ArchitectureSpec(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    model_type="qwen2",
    gguf_name="qwen2",
    hf=HF_TENSORS,
    gguf=GGUF_TENSORS,
    traits=_traits,
)
