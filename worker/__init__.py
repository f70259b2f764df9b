"""One model, served: request → tokens. `from worker import LLM, AsyncLLM, SamplingParams` without a server.

Names are imported on first use, so that the server process never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.async_llm import AsyncLLM as AsyncLLM
    from worker.llm import LLM as LLM
    from worker.params import SamplingParams as SamplingParams
    from worker.params import StructuredOutputs as StructuredOutputs

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from worker.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from worker.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from worker.params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from worker.params import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(name)
