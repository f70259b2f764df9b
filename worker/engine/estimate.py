"""What an engine will take, before it is started: the same sum as the engine's own, without torch.

Weights and KV pages are exact; activations, graphs and context are estimates that lie above what was
measured. An engine on a card measures its activations and makes pages of the difference.
"""

from __future__ import annotations

from typing import Final

from contracts.options import WorkerOptions
from contracts.plan import Estimate
from worker.engine.budget import PageRequest, count_pages
from worker.engine.sizes import ITEM_BYTES, Sizes, card_budget, resolve_sizes
from worker.model.config import ModelConfig, kv_page_bytes
from worker.model.shapes import weight_bytes

MIB: Final = 1 << 20
CUDA_CONTEXT: Final = 640 * MIB  # context, libraries, and what torch's allocator rounds up to
CPU_PROCESSES: Final = 640 * MIB  # interpreter and libraries of server and engine
WORKSPACE: Final = 96 * MIB  # of matrix products and of attention's partial sums
GRAPH_NODES: Final = 128 * MIB  # of all captured steps
LARGEST_GRAPH: Final = 1280  # tokens, of a step with prompts


def estimate(model: ModelConfig, options: WorkerOptions, card_bytes: int | None) -> Estimate:
    """What a worker takes on a card with `card_bytes`, or in the host's memory (None).

    DoesNotFit when it takes too much, EngineError when it can't be built as asked; the message has the sum
    and the option to change.
    """
    on_gpu = card_bytes is not None
    sizes = resolve_sizes(model, options, on_gpu)
    item = ITEM_BYTES[sizes.dtype]
    weights = weight_bytes(model, item)
    if not on_gpu and model.tie_word_embeddings:
        weights += model.vocab_size * model.hidden_size * item  # rows to look up, and packed for the product
    activations = activation_bytes(model, sizes) if on_gpu else 0
    page = kv_page_bytes(model, sizes.page_size, ITEM_BYTES[sizes.kv_dtype])
    budget = None if card_bytes is None else card_budget(options, card_bytes)
    request = PageRequest(
        page_bytes=page,
        page_size=sizes.page_size,
        max_model_len=sizes.max_model_len,
        max_model_len_fixed=sizes.max_model_len_fixed,
        max_num_seqs=sizes.max_num_seqs,
        budget=budget,
        kv_cache_bytes=options.kv_cache_memory_bytes,
        num_pages=options.num_gpu_blocks_override,
    )
    pages = count_pages(request, weights, activations)
    return Estimate(
        weights=weights,
        activations=activations,
        kv_cache=pages.num_pages * page,
        graphs=graph_bytes(model, sizes) if on_gpu and not options.enforce_eager else 0,
        context=CUDA_CONTEXT if on_gpu else CPU_PROCESSES,
        num_pages=pages.num_pages,
        page_size=sizes.page_size,
        max_model_len=pages.max_model_len,
        budget=budget,
    )


def activation_bytes(model: ModelConfig, sizes: Sizes) -> int:
    """Peak of the largest step: the wider of a layer's halves, with everything alive in it at once."""
    hidden, inner = model.hidden_size, model.intermediate_size
    heads = model.num_heads * model.head_dim
    qkv = heads + 2 * model.num_kv_heads * model.head_dim
    attention, mlp = 3 * hidden + 2 * qkv + heads, 3 * hidden + 3 * inner
    item = ITEM_BYTES[sizes.dtype]
    return item * (sizes.largest_step * max(attention, mlp) + model.vocab_size) + WORKSPACE


def graph_bytes(model: ModelConfig, sizes: Sizes) -> int:
    """Captured steps share the memory of the largest; their logits have a place of their own."""
    item = ITEM_BYTES[sizes.dtype]
    row = 3 * (model.hidden_size + model.intermediate_size) * item
    logits = sizes.max_num_seqs * model.vocab_size * item
    return row * max(sizes.max_num_seqs, LARGEST_GRAPH) + logits + GRAPH_NODES
