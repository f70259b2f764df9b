"""The memory sum: budget = weights + activations + KV pages.

Sized from the budget, never from what happens to be free, so two workers that start together get what each
would get alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from contracts.units import format_bytes
from worker.engine.sizes import DoesNotFit
from worker.model.config import kv_page_bytes

if TYPE_CHECKING:
    from worker.engine.config import EngineConfig

DEFAULT_CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PageBudget:
    """How many KV pages, and how long a sequence can get with them."""

    num_pages: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What decides how many pages there are; sizes in bytes. `budget`: of everything on the card; None on a
    CPU. `num_pages` and `kv_cache_bytes`: asked for outright."""

    page_bytes: int
    page_size: int
    max_model_len: int
    max_model_len_fixed: bool
    max_num_seqs: int
    budget: int | None
    kv_cache_bytes: int | None
    num_pages: int | None


def plan_pages(config: EngineConfig, weight_bytes: int, activation_bytes: int) -> PageBudget:
    """Pages for a model that takes this much besides. DoesNotFit, with the sum, when they are too few."""
    request = PageRequest(
        page_bytes=kv_page_bytes(config.source.config, config.page_size, config.kv_dtype.itemsize),
        page_size=config.page_size,
        max_model_len=config.max_model_len,
        max_model_len_fixed=config.max_model_len_fixed,
        max_num_seqs=config.max_num_seqs,
        budget=config.gpu_memory_bytes,
        kv_cache_bytes=config.kv_cache_bytes,
        num_pages=config.num_pages,
    )
    return count_pages(request, weight_bytes, activation_bytes)


def count_pages(request: PageRequest, weight_bytes: int, activation_bytes: int) -> PageBudget:
    """`plan_pages` in plain numbers: nothing of it needs a device."""
    pages, explanation = _pages(request, weight_bytes, activation_bytes)
    room = (pages - 1) * request.page_size
    if pages < 2 or (request.max_model_len_fixed and room < request.max_model_len):
        raise DoesNotFit(
            f"the KV cache is too small: {explanation}; a page of {request.page_size} tokens takes "
            f"{format_bytes(request.page_bytes)}, so {max(0, room)} tokens fit and max_model_len is "
            f"{request.max_model_len}. "
            "Raise gpu_memory or kv_cache_memory_bytes, or lower max_model_len or max_num_batched_tokens"
        )
    return PageBudget(pages, min(request.max_model_len, room))


def _pages(request: PageRequest, weight_bytes: int, activation_bytes: int) -> tuple[int, str]:
    """Number of pages, the null page included, and the sum in words."""
    if request.num_pages is not None:
        return request.num_pages, f"num_gpu_blocks_override {request.num_pages}"
    if request.kv_cache_bytes is not None:
        available = request.kv_cache_bytes
        explanation = f"kv_cache_memory_bytes {format_bytes(available)}"
    elif request.budget is None:
        available = DEFAULT_CPU_KV_BYTES
        explanation = f"{format_bytes(available)} by default on a CPU"
    else:
        available = request.budget - weight_bytes - activation_bytes
        explanation = (
            f"budget {format_bytes(request.budget)} - weights {format_bytes(weight_bytes)} "
            f"- activations {format_bytes(activation_bytes)} = {format_bytes(available)} for KV pages"
        )
    # More than every sequence at full length could hold would be waste.
    most = request.max_num_seqs * -(-request.max_model_len // request.page_size) + 1
    return min(available // request.page_bytes, most), explanation
