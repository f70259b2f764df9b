"""Runner: executes steps on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch
from worker.engine.config import EngineConfig
from worker.engine.scheduler import Step
from worker.ipc.messages import TokenLogprob
from worker.model.layers import CausalLM
from worker.runner.batch import BatchBuilder
from worker.runner.kv_cache import KvCache
from worker.runner.sampler import Sampled, Sampler


@dataclass(slots=True)
class Launched:
    """A step on its way: the device may still be computing it."""

    step: Step
    sampled: Sampled | None

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Tokens and log-probabilities of the step's sampling rows, in row order. Waits for the device."""
        return self.sampled.read() if self.sampled is not None else ([], [])


class Runner:
    """Model, KV cache and sampler on one device."""

    def __init__(self, model: CausalLM, config: EngineConfig, kv_cache: KvCache) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._builder = BatchBuilder(
            config.max_num_seqs, config.max_model_len, config.page_size, config.device
        )
        vocab = config.source.config.vocab_size
        self._sampler = Sampler(config.max_num_seqs, vocab, config.vocab_limit, config.device)
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=config.device)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Start a step. On a GPU it returns before the step has run."""
        inputs = self._builder.build(step, self._last_tokens)
        if inputs.fresh:
            self._sampler.begin(inputs.fresh)
        hidden = self.model.forward(inputs.token_ids, inputs.attention, self.kv_cache.layers)
        if not inputs.sampled:
            return Launched(step, None)
        if len(inputs.sampled) < len(hidden):
            hidden = hidden[inputs.sample_rows]
        sampled = self._sampler.sample(self.model.compute_logits(hidden), inputs.sampled)
        if self._last_tokens.is_cuda:
            rows = torch.tensor([request.row for request in inputs.sampled], device=self._last_tokens.device)
            self._last_tokens[rows] = sampled.tokens
        return Launched(step, sampled)


@torch.inference_mode()
def dry_run(model: CausalLM, config: EngineConfig, kv_cache: KvCache, shapes: list[tuple[int, int]]) -> None:
    """Run steps of (sequences, tokens each) that read and write the null page only: compiles kernels, shows
    peak memory."""
    device = config.device
    for sequences, tokens in shapes:
        total = sequences * tokens
        positions = torch.arange(tokens, device=device).repeat(sequences)
        batch = AttentionBatch(
            positions=positions,
            slots=positions % config.page_size,
            block_tables=torch.zeros(
                sequences, -(-tokens // config.page_size), dtype=torch.int32, device=device
            ),
            seq_lens=torch.full((sequences,), tokens, dtype=torch.int32, device=device),
            query_starts=torch.arange(0, total + 1, tokens, dtype=torch.int32, device=device),
            num_decodes=sequences if tokens == 1 else 0,
            max_query_len=tokens,
            max_seq_len=tokens,
        )
        token_ids = torch.zeros(total, dtype=torch.int64, device=device)
        hidden = model.forward(token_ids, batch, kv_cache.layers)
        model.compute_logits(hidden[: min(total, config.max_num_seqs)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def activation_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Peak memory that `run` takes on top of what is allocated already; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return int(torch.cuda.max_memory_allocated(device)) - before
