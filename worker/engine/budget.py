"""The memory sum: budget = weights + activations + KV pages.

Sized from the budget, never from what happens to be free, so two workers that start together get what each
would get alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.units import format_bytes
from worker.engine.config import EngineConfig, EngineError
from worker.model.config import kv_page_bytes

DEFAULT_CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PageBudget:
    """How many KV pages, and how long a sequence can get with them."""

    num_pages: int
    max_model_len: int


def plan_pages(config: EngineConfig, weight_bytes: int, activation_bytes: int) -> PageBudget:
    """Pages for a model that takes this much besides. EngineError, with the sum, when they are too few."""
    page_bytes = kv_page_bytes(config.source.config, config.page_size, config.kv_dtype)
    pages, explanation = _pages(config, page_bytes, weight_bytes, activation_bytes)
    room = (pages - 1) * config.page_size
    if pages < 2 or (config.max_model_len_fixed and room < config.max_model_len):
        raise EngineError(
            f"the KV cache is too small: {explanation}; a page of {config.page_size} tokens takes "
            f"{format_bytes(page_bytes)}, so {max(0, room)} tokens fit and max_model_len is "
            f"{config.max_model_len}. "
            "Raise gpu_memory or kv_cache_memory_bytes, or lower max_model_len or max_num_batched_tokens"
        )
    return PageBudget(pages, min(config.max_model_len, room))


def _pages(
    config: EngineConfig, page_bytes: int, weight_bytes: int, activation_bytes: int
) -> tuple[int, str]:
    """Number of pages, the null page included, and the sum in words."""
    if config.num_pages is not None:
        return config.num_pages, f"num_gpu_blocks_override {config.num_pages}"
    if config.kv_cache_bytes is not None:
        available = config.kv_cache_bytes
        explanation = f"kv_cache_memory_bytes {format_bytes(available)}"
    elif config.gpu_memory_bytes is None:
        available = DEFAULT_CPU_KV_BYTES
        explanation = f"{format_bytes(available)} by default on a CPU"
    else:
        available = config.gpu_memory_bytes - weight_bytes - activation_bytes
        explanation = (
            f"budget {format_bytes(config.gpu_memory_bytes)} - weights {format_bytes(weight_bytes)} "
            f"- activations {format_bytes(activation_bytes)} = {format_bytes(available)} for KV pages"
        )
    # More than every sequence at full length could hold would be waste.
    most = config.max_num_seqs * -(-config.max_model_len // config.page_size) + 1
    return min(available // page_bytes, most), explanation
