"""The architectures that are served."""

from __future__ import annotations

from typing import Final

from worker.model.config import Architecture
from worker.model.llama import LLAMA
from worker.model.mistral import MISTRAL
from worker.model.phi3 import PHI3
from worker.model.qwen2 import QWEN2
from worker.model.qwen3 import QWEN3
from worker.model.tables import ArchitectureSpec

ARCHITECTURES: Final[dict[Architecture, ArchitectureSpec]] = {
    spec.name: spec for spec in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)
}
