"""Architecture name → where its checkpoints' tensors go."""

from __future__ import annotations

from typing import Final

from worker.model.config import Architecture
from worker.model.llama import LLAMA
from worker.model.phi3 import PHI3
from worker.model.qwen2 import QWEN2
from worker.model.tables import CheckpointLayout

LAYOUTS: Final[dict[Architecture, CheckpointLayout]] = {"llama": LLAMA, "qwen2": QWEN2, "phi3": PHI3}
