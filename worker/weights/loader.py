"""A model from its source: parameters allocated once, checkpoint tensors streamed straight into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from worker.model.config import ModelConfig
from worker.model.layers import CausalLM
from worker.model.registry import ARCHITECTURES
from worker.weights.gguf_header import read_gguf_header
from worker.weights.random_weights import fill_random
from worker.weights.safetensors_files import read_safetensors
from worker.weights.safetensors_header import safetensors_files
from worker.weights.source import ModelSource
from worker.weights.targets import CheckpointTensor, Targets

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@torch.inference_mode()
def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    rope_theta: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    allocated: Callable[[CausalLM], None] = lambda model: None,
) -> CausalLM:
    """Allocate the model on `device` and fill it; memory peaks at the weights and one tensor.

    Args:
        source: what `resolve_source` found.
        dtype: of weights and activations, whatever the checkpoint's is.
        device: where parameters live; random ones are made there.
        max_model_len: tokens of the longest sequence; see `worker.model.rope`.
        rope_theta: replaces the checkpoint's base of the rotary embedding.
        seed: of `random:` weights.
        progress: called with bytes of the checkpoint read and their sum.
        allocated: called with the model before it is filled.

    Raises:
        SourceError: a tensor is missing, unexpected, of the wrong shape or type, or a file is corrupt.
    """
    config = _with_theta(source.config, rope_theta)
    with _one_thread():
        model = CausalLM(config, dtype=dtype, device=device, max_model_len=max_model_len)
        allocated(model)
        if source.kind == "random":
            _fill_random(model, seed, progress)
        else:
            _fill_from_checkpoint(model, source, progress)
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is many short copies, which threads don't speed up; where several workers start on few cores
    they wait for each other at every one (the demo model on two busy cores: 16 s instead of 4)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _with_theta(config: ModelConfig, rope_theta: float | None) -> ModelConfig:
    return config if rope_theta is None else replace(config, rope=replace(config.rope, theta=rope_theta))


def _fill_from_checkpoint(model: CausalLM, source: ModelSource, progress: Progress | None) -> None:
    config, layout = model.config, ARCHITECTURES[model.config.architecture]
    if source.kind == "gguf":
        # Not at the top: the gguf library takes a quarter of a second that other kinds needn't pay.
        from worker.weights.gguf_tensors import read_gguf

        header = read_gguf_header(source.path)
        targets = Targets(config, model.named_parameters, layout.gguf, source.path)
        _fill(targets, read_gguf(header), sum(tensor.nbytes for tensor in header.tensors), progress)
    else:
        files = safetensors_files(source.path)
        table = layout.hf
        if config.headless:
            table = {name.removeprefix("model."): slot for name, slot in table.items()}
        targets = Targets(config, model.named_parameters, table, source.path)
        _fill(targets, read_safetensors(files), sum(file.stat().st_size for file in files), progress)


def _fill(
    targets: Targets, tensors: Iterable[CheckpointTensor], total: int, progress: Progress | None
) -> None:
    done = 0
    for tensor in tensors:
        targets.fill(tensor)
        done += tensor.nbytes
        if progress:
            progress(done, total)
    targets.finish()
    if progress:
        progress(total, total)


def _fill_random(model: CausalLM, seed: int, progress: Progress | None) -> None:
    generator = torch.Generator(model.device).manual_seed(seed)
    done = 0
    for name, parameter in model.named_parameters.items():
        fill_random(name, parameter, generator)
        done += parameter.nbytes
        if progress:
            progress(done, model.weight_bytes)
