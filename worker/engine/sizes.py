"""What a worker's options come to for a model, as plain numbers: the one formula of the engine and of the
memory plan. Nothing here needs torch or a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from contracts.options import WorkerOptions
from worker.model.config import ModelConfig

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


class EngineError(ValueError):
    """The engine can't be built as asked; the message names the option to change."""


class DoesNotFit(EngineError):
    """It would take more memory than it may."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths and counts of an engine; `dtype` and `kv_dtype` by torch's names.

    max_model_len_fixed: asked for, so the engine refuses to start with a smaller KV cache rather than serve
    less.
    """

    dtype: str
    kv_dtype: str
    max_model_len: int
    max_model_len_fixed: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int

    @property
    def largest_step(self) -> int:
        """Tokens of the step that takes most memory."""
        return min(self.max_num_batched_tokens, self.max_model_len)


def resolve_sizes(model: ModelConfig, options: WorkerOptions, on_gpu: bool) -> Sizes:
    """Fill in what `options` leave open. EngineError for what can't be together."""
    longest = model.context_length
    if options.max_model_len is not None and options.max_model_len > longest:
        scaling = model.rope.scaling
        stretched = (
            f", {type(scaling).__name__.removesuffix('Scaling').lower()} rope scaling" if scaling else ""
        )
        raise EngineError(
            f"max_model_len {options.max_model_len} is longer than the {longest} positions the model was "
            f"made for (max_position_embeddings {model.max_position_embeddings}{stretched}); lower it"
        )
    max_model_len = options.max_model_len or longest
    tokens = options.max_num_batched_tokens or (8192 if on_gpu else 512)
    max_num_seqs = options.max_num_seqs or min(1024 if on_gpu else 64, tokens)
    if not options.enable_chunked_prefill:
        tokens = max(tokens, max_model_len)
    if tokens < max_num_seqs:
        raise EngineError(
            f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({max_num_seqs}): "
            "a step must have room for a token of every sequence"
        )
    dtype = _dtype(options, model, on_gpu)
    return Sizes(
        dtype=dtype,
        kv_dtype=_kv_dtype(options, dtype),
        max_model_len=max_model_len,
        max_model_len_fixed=options.max_model_len is not None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        page_size=options.block_size,
    )


def _kv_dtype(options: WorkerOptions, dtype: str) -> str:
    asked = options.kv_cache_dtype
    return dtype if asked == "auto" else _FP8.get(asked, asked)


def card_budget(options: WorkerOptions, total: int) -> int:
    """Bytes of a card with `total` that the worker may have. DoesNotFit when the card is smaller."""
    budget = options.gpu_memory or int(total * options.gpu_memory_utilization)
    if budget > total:
        raise DoesNotFit(f"gpu_memory {budget} bytes is more than the card's {total}")
    return budget


def _dtype(options: WorkerOptions, model: ModelConfig, on_gpu: bool) -> str:
    if options.dtype == "auto":
        return model.torch_dtype if on_gpu else "float32"
    if not on_gpu and options.dtype != "float32":
        raise EngineError(f"dtype {options.dtype} needs a GPU; on a CPU only float32 is fast and exact")
    return options.dtype
