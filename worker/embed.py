"""Embeddings of many prompts by an engine in the caller's own process: what `LLM.embed` runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.progress import Progress

from worker.engine.loop import Engine
from worker.interrupts import interrupts_held
from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams
from worker.pooling import finish_vector


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector of `PoolingConfig.size` numbers, or of as many as were asked for."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding. `prompt` is None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    cached_tokens: int = 0


def embed_all(
    engine: Engine,
    prompts: Sequence[tuple[str | None, list[int]]],
    names: Iterator[int],
    dimensions: int | None = None,
    progress: bool = False,
) -> list[EmbeddingRequestOutput]:
    """Embeddings of prompts (text, token ids), in their order. ValueError, before anything runs, for a model
    that makes none, a prompt that can't run, or a size that the model wasn't trained for."""
    pooling = engine.info.pooling
    if pooling is None:
        raise ValueError("this model generates; the option runner='pooling' makes it give embeddings")
    if dimensions is not None and not pooling.allows(dimensions):
        raise ValueError(
            f"embeddings of this model can't be cut to {dimensions} numbers; they have {pooling.size}"
        )
    for _, tokens in prompts:
        if not 0 < len(tokens) <= engine.info.max_model_len:
            raise ValueError(
                f"a prompt has {len(tokens)} tokens, not 1 to max_model_len ({engine.info.max_model_len})"
            )
    waiting: dict[str, int] = {}
    results: dict[int, EmbeddingRequestOutput] = {}
    with interrupts_held() as let_interrupts_through:
        try:
            for place, (_, tokens) in enumerate(prompts):
                name = f"embed-{next(names)}"
                message = EngineRequest(
                    name, tokens, SamplingParams(), 0, arrival=time.monotonic(), pooling=pooling.type
                )
                refused = engine.add(message)
                if refused is not None:
                    raise ValueError(refused.error)
                waiting[name] = place
            with Progress(transient=True, disable=not progress) as bar:
                task = bar.add_task("embed", total=len(prompts))
                while waiting:
                    let_interrupts_through()
                    for output in engine.step():
                        place = waiting.pop(output.request_id)
                        if output.pooled is None:
                            raise RuntimeError(output.error)
                        vector = finish_vector(output.pooled, pooling, dimensions)
                        results[place] = EmbeddingRequestOutput(
                            *prompts[place], EmbeddingOutput(vector.tolist()), output.cached_tokens
                        )
                        bar.advance(task)
        finally:
            for name in waiting:  # after an exception or Ctrl-C: leave nothing running
                engine.abort(name)
            engine.drain()
    return [results[place] for place in range(len(prompts))]
