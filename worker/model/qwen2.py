"""Qwen2 and Qwen2.5: Llama's tensors, always with a bias on queries, keys and values.

llama.cpp rotates this family in halves as its authors do, so nothing is permuted in its GGUF files.
"""

from __future__ import annotations

from worker.model.llama import LLAMA
from worker.model.tables import CheckpointLayout

QWEN2 = CheckpointLayout(
    hf=LLAMA.hf,
    gguf={name: slot._replace(permuted=False) for name, slot in LLAMA.gguf.items()},
)
