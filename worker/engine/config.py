"""EngineConfig: the worker's options resolved against the model and the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from contracts.options import WorkerOptions
from worker.model.config import ModelConfig
from worker.weights.source import ModelSource


class EngineError(ValueError):
    """The engine can't be built as asked; the message names the option to change."""


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
    enforce_eager: bool
    vocab_limit: int
    eos_token_ids: frozenset[int]
    threads: int
    seed: int
    rope_theta: float | None
    gpu_memory_bytes: int | None  # budget for everything on the card; None on a CPU
    kv_cache_bytes: int | None
    num_pages: int | None


def resolve(source: ModelSource, options: WorkerOptions, vocab_limit: int | None = None) -> EngineConfig:
    """Fill in what `options` leave open. EngineError when they can't be had on this machine or with this
    model.

    `vocab_limit` is the tokenizer's size: ids of the output layer beyond it are padding and are never
    sampled.
    """
    model = source.config
    device = _device(options)
    on_gpu = device.type == "cuda"
    dtype = _dtype(options, model, on_gpu)
    longest = model.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > longest:
        raise EngineError(
            f"max_model_len {options.max_model_len} is longer than the {longest} positions "
            "the model was made for"
        )
    max_model_len = options.max_model_len or longest
    max_num_seqs = options.max_num_seqs or (256 if on_gpu else 64)
    tokens = options.max_num_batched_tokens or (8192 if on_gpu else 512)
    if not options.enable_chunked_prefill:
        tokens = max(tokens, max_model_len)
    if tokens < max_num_seqs:
        raise EngineError(
            f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({max_num_seqs}): "
            "a step must have room for a token of every sequence"
        )
    return EngineConfig(
        source=source,
        device=device,
        dtype=dtype,
        kv_dtype=dtype if options.kv_cache_dtype == "auto" else _torch_dtype(options.kv_cache_dtype),
        max_model_len=max_model_len,
        max_model_len_fixed=options.max_model_len is not None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        page_size=options.block_size,
        prefix_cache=options.enable_prefix_caching,
        chunked_prefill=options.enable_chunked_prefill,
        enforce_eager=options.enforce_eager,
        vocab_limit=min(vocab_limit or model.vocab_size, model.vocab_size),
        eos_token_ids=frozenset(source.generation.get("eos_token_ids", model.eos_token_ids)),
        threads=options.threads or len(os.sched_getaffinity(0)),
        seed=options.seed,
        rope_theta=options.rope_theta,
        gpu_memory_bytes=_gpu_budget(options, device) if on_gpu else None,
        kv_cache_bytes=options.kv_cache_memory_bytes,
        num_pages=options.num_gpu_blocks_override,
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


def _dtype(options: WorkerOptions, model: ModelConfig, on_gpu: bool) -> torch.dtype:
    if options.dtype == "auto":
        return _torch_dtype(model.torch_dtype) if on_gpu else torch.float32
    if not on_gpu and options.dtype != "float32":
        raise EngineError(f"dtype {options.dtype} needs a GPU; on a CPU only float32 is fast and exact")
    return _torch_dtype(options.dtype)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _gpu_budget(options: WorkerOptions, device: torch.device) -> int:
    total = torch.cuda.get_device_properties(device).total_memory
    budget = options.gpu_memory or int(total * options.gpu_memory_utilization)
    if budget > total:
        raise EngineError(f"gpu_memory {budget} bytes is more than the card's {total}")
    return budget
