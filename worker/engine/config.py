"""EngineConfig: the worker's options resolved against the model and the machine."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from contracts.options import WorkerOptions
from worker.engine.sizes import EngineError, card_budget, resolve_sizes
from worker.pooling import PoolingConfig
from worker.weights.pooling import find_pooling
from worker.weights.source import ModelSource


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs, with no default left open."""

    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    max_model_len_fixed: bool  # asked for: refuse to start with a smaller KV cache rather than serve less
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    prefix_cache: bool
    chunked_prefill: bool
    tpot_target: float | None  # seconds; None: in proportion to decode steps, inf: no bound
    enforce_eager: bool
    vocab_limit: int
    eos_token_ids: frozenset[int]
    threads: int
    seed: int
    rope_theta: float | None
    gpu_memory_bytes: int | None  # budget for everything on the card; None on a CPU
    kv_cache_bytes: int | None
    num_pages: int | None
    pooling: PoolingConfig | None  # None: the model generates
    tokenizer: str | None  # instead of the model's own


def resolve(source: ModelSource, options: WorkerOptions, vocab_limit: int | None = None) -> EngineConfig:
    """Fill in what `options` leave open. EngineError when they can't be had on this machine or with this
    model.

    `vocab_limit` is the tokenizer's size: ids of the output layer beyond it are padding and are never
    sampled.
    """
    model = source.config
    device = _device(options)
    on_gpu = device.type == "cuda"
    sizes = resolve_sizes(model, options, on_gpu)
    if on_gpu:
        _check_kv_dtype(_torch_dtype(sizes.kv_dtype), torch.cuda.get_device_capability(device))
    return EngineConfig(
        source=source,
        device=device,
        dtype=_torch_dtype(sizes.dtype),
        kv_dtype=_torch_dtype(sizes.kv_dtype),
        max_model_len=sizes.max_model_len,
        max_model_len_fixed=sizes.max_model_len_fixed,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        page_size=sizes.page_size,
        prefix_cache=options.enable_prefix_caching,
        chunked_prefill=options.enable_chunked_prefill,
        tpot_target=_tpot_target(options, device),
        enforce_eager=options.enforce_eager,
        vocab_limit=min(vocab_limit or model.vocab_size, model.vocab_size),
        eos_token_ids=frozenset(source.generation.get("eos_token_ids", model.eos_token_ids)),
        threads=options.threads or len(os.sched_getaffinity(0)),
        seed=options.seed,
        rope_theta=options.rope_theta,
        gpu_memory_bytes=_gpu_budget(options, device) if on_gpu else None,
        kv_cache_bytes=options.kv_cache_memory_bytes,
        num_pages=options.num_gpu_blocks_override,
        pooling=find_pooling(source, options.runner, options.pooling_type),
        tokenizer=options.tokenizer,
    )


def _device(options: WorkerOptions) -> torch.device:
    wanted = options.device
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        if wanted == "cuda":
            raise EngineError(
                "device cuda is asked for, but torch sees no GPU; check the driver, or set device: cpu"
            )
        return torch.device("cpu")
    index = options.gpus[0] if options.gpus else 0
    if index >= count:
        raise EngineError(f"gpus names GPU {index}, but this machine has {count} (0 to {count - 1})")
    if len(options.gpus) > 1:
        raise EngineError("gpus names several GPUs; one worker uses one so far")
    return torch.device("cuda", index)


def _check_kv_dtype(kv_dtype: torch.dtype, capability: tuple[int, int]) -> None:
    if kv_dtype == torch.float8_e4m3fn and capability < (8, 9):
        raise EngineError(
            "kv_cache_dtype fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, this one has "
            f"{capability[0]}.{capability[1]}; leave it out, or set bfloat16"
        )


def _tpot_target(options: WorkerOptions, device: torch.device) -> float | None:
    milliseconds = options.tpot_target_ms
    if milliseconds == 0 or not options.enable_chunked_prefill:
        return math.inf
    if milliseconds is None:  # a card takes thousands of tokens in the time that a reader waits for a word
        return math.inf if device.type == "cuda" else None
    return milliseconds / 1000


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _gpu_budget(options: WorkerOptions, device: torch.device) -> int:
    return card_budget(options, torch.cuda.get_device_properties(device).total_memory)
