"""What an engine needs before its first step: weights, and kernels that compile while those load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.ahead import compiling_ahead
from worker.engine.config import EngineConfig
from worker.model.layers import CausalLM
from worker.runner.kv_cache import KvCache
from worker.runner.step import Runner, dry_run
from worker.weights.loader import load_model


def load(config: EngineConfig, progress: Callable[[int, int], None]) -> CausalLM:
    """The model with its weights; on a GPU its kernels are compiled, too."""
    fill = partial(
        load_model,
        config.source,
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        rope_theta=config.rope_theta,
        seed=config.seed,
        progress=progress,
    )
    if config.device.type != "cuda":
        return fill()
    with compiling_ahead(torch.cuda.current_device()):
        return fill(allocated=partial(_compile, config))


def make_runner(config: EngineConfig, model: CausalLM, kv_cache: KvCache, max_model_len: int) -> Runner:
    return Runner(
        model,
        kv_cache,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_limit=config.vocab_limit,
        max_num_batched_tokens=config.max_num_batched_tokens,
        graphs=config.device.type == "cuda" and not config.enforce_eager,
    )


def largest_step(config: EngineConfig) -> tuple[int, int]:
    """The step that takes most memory: sequences, tokens of each."""
    return 1, min(config.max_num_batched_tokens, config.max_model_len)


def smallest_steps(config: EngineConfig) -> list[tuple[int, int]]:
    """Steps with which an engine's first requests begin."""
    return [(1, 1), (2, 1), (1, min(32, config.max_model_len))]


def leading_cache(config: EngineConfig) -> KvCache:
    """A cache to try steps with, which then run through so many layers that every kernel is launched."""
    shape = config.source.config
    leading = replace(shape, num_layers=shape.leading_layers)
    return KvCache(leading, 2, config.page_size, config.kv_dtype, config.device)


@torch.inference_mode()
def _compile(config: EngineConfig, model: CausalLM) -> None:
    """Steps of every kind, through the leading layers."""
    cache = leading_cache(config)
    dry_run(model, cache, [largest_step(config), *smallest_steps(config)])
    make_runner(config, model, cache, config.max_model_len).compile()
    del cache
    torch.cuda.empty_cache()
