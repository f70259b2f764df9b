"""Runner: executes steps on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from worker.ipc.messages import TokenLogprob
from worker.model.layers import CausalLM
from worker.request import Step
from worker.runner.batch import BatchState, HostStep, device_step, host_step
from worker.runner.form_masks import FormMask, FormMasks
from worker.runner.graphs import DecodeGraphs, graph_sizes
from worker.runner.kv_cache import KvCache
from worker.runner.mixed_graphs import MixedGraphs, mixed_sizes
from worker.runner.pooler import Pooled, Pooler
from worker.runner.prompt_logprobs import PromptScorer, Scored
from worker.runner.sampler import Sampled, Sampler
from worker.runner.transfer import to_device


@dataclass(slots=True)
class Launched:
    """A step on its way: the device may still be computing it. Its tokens are drawn by `Runner.sample`."""

    step: Step
    host: HostStep
    logits: Tensor | None  # [R, vocab] of the rows that sample, until they have; None without any
    pooled: Pooled | None = None
    sampled: Sampled | None = None
    scored: Scored | None = None

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Tokens and log-probabilities of the step's sampling rows, in row order. Waits for the device."""
        return self.sampled.read() if self.sampled is not None else ([], [])


class Runner:
    """Model, KV cache and sampler on one device."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KvCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_limit: int,
        max_num_batched_tokens: int,
        graphs: bool,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        device = kv_cache.pool.device
        self._state = BatchState(
            max_num_seqs,
            max_model_len,
            kv_cache.page_size,
            device,
            one_table=model.first_row(max_model_len) == 0,
        )
        self._sampler = Sampler(model.config.vocab_size, vocab_limit, device, self._state.last_tokens)
        self._forms = FormMasks(max_num_seqs, device)
        self._pooler = Pooler()
        self._scorer = PromptScorer(model.compute_logits, model.config.vocab_size, vocab_limit)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        if graphs:
            sizes = mixed_sizes(max_num_batched_tokens)
            self._graphs = DecodeGraphs(model, self._state, kv_cache, graph_sizes(max_num_seqs))
            self._mixed = MixedGraphs(model, self._state, kv_cache, sizes, max_num_seqs)

    def compile(self) -> None:
        """Within `compiling_ahead`: have what steps launch compiled; whatever model and cache hold."""
        self._sampler.warm_up(next(self.model.parameters()).dtype)
        if self._graphs is not None and self._mixed is not None:
            self._graphs.compile()
            self._mixed.compile()

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile the sampler's kernels, and capture CUDA graphs, where they are used."""
        self._sampler.warm_up(next(self.model.parameters()).dtype)
        if self._graphs is None or self._mixed is None:
            return
        total = len(self._graphs.sizes) + len(self._mixed.sizes)
        done = itertools.count(1)
        self._graphs.capture(lambda: on_progress(next(done), total))
        self._mixed.capture(self._graphs.pool, lambda: on_progress(next(done), total))

    def launch(self, step: Step) -> Launched:
        """Start a step. On a GPU it returns before the step has run."""
        launched = self.forward(step)
        self.sample(launched)
        return launched

    def forget_rows(self) -> None:
        """No row belongs to anybody: after an exception within a step."""
        self._state.forget()

    @torch.inference_mode()
    def forward(self, step: Step) -> Launched:
        """The first part of `launch`: the model. `sample` must follow before the next step's."""
        host = host_step(step, self._state)
        if host.fresh:
            self._sampler.begin(host.fresh)
        logits = self._graphs.run(host) if self._graphs is not None and host.decode_only else None
        launched = Launched(step, host, logits)
        if logits is None:
            self._run(launched)
        return launched

    def begin_form(self, places: list[int], words: int) -> FormMask:
        """Memory for what forms allow in these rows of the next step that samples: see FormMasks.begin."""
        return self._forms.begin(places, words)

    @torch.inference_mode()
    def sample(self, launched: Launched, form: FormMask | None = None) -> None:
        """The second part: draw a token for every row that samples; `form` for answers that must have one."""
        if launched.logits is None:
            return
        host = launched.host
        launched.sampled = self._sampler.sample(launched.logits, host.sampled, form)
        launched.logits = None
        device = self._state.last_tokens.device
        if device.type == "cuda":
            rows = to_device(torch.from_numpy(host.rows[host.sample_rows]), device)
            self._state.last_tokens[rows] = launched.sampled.tokens.clamp(min=0)  # not NOT_FINITE

    def _run(self, launched: Launched) -> None:
        """A step that is not all decodes: logits of the rows that sample, and what is asked about prompts."""
        step, host = launched.step, launched.host
        if not (step.pools or step.scores):
            hidden = self._states(host, host.sample_rows)
        else:
            pooled, for_pooling = self._pooler.plan(step, host.starts)
            scored, for_scores = self._scorer.plan(step, host.starts)
            states = self._states(host, np.concatenate([host.sample_rows, pooled, scored]))
            first, second = len(host.sample_rows), len(host.sample_rows) + len(pooled)
            hidden = states[:first]
            launched.pooled = self._pooler.pool(states[first:second], for_pooling)
            launched.scored = self._scorer.score(states[second:], for_scores)
        if host.sampled:
            launched.logits = self.model.compute_logits(hidden)

    def _states(self, host: HostStep, places: np.ndarray) -> Tensor:
        """Hidden states [P, hidden_size] after the final norm of the tokens at `places` [P] of the step; of
        its first token for no places."""
        if not len(places):
            places = np.zeros(1, np.int64)
        rows = to_device(torch.from_numpy(places), self.kv_cache.pool.device)
        hidden = self._mixed.forward(host) if self._mixed is not None else None
        if hidden is not None:
            return hidden[rows]
        tokens, batch = device_step(host, self._state)
        every = len(places) == len(tokens) and bool((places[1:] > places[:-1]).all())
        return self.model.forward(tokens, batch, self.kv_cache.layers, None if every else rows)


@torch.inference_mode()
def dry_run(model: CausalLM, kv_cache: KvCache, shapes: list[tuple[int, int]]) -> None:
    """Run steps of (sequences, tokens each) that read and write the null page only: compiles kernels, shows
    peak memory."""
    device, page_size = kv_cache.pool.device, kv_cache.page_size
    for sequences, tokens in shapes:
        total = sequences * tokens
        positions = torch.arange(tokens, device=device).repeat(sequences)
        batch = AttentionBatch(
            positions=positions,
            slots=positions % page_size,
            block_tables=torch.zeros(sequences, -(-tokens // page_size), dtype=torch.int32, device=device),
            seq_lens=torch.full((sequences,), tokens, dtype=torch.int32, device=device),
            query_starts=torch.arange(0, total + 1, tokens, dtype=torch.int32, device=device),
            num_decodes=sequences if tokens == 1 else 0,
            max_query_len=tokens,
            max_seq_len=tokens,
        )
        token_ids = torch.zeros(total, dtype=torch.int64, device=device)
        hidden = model.forward(token_ids, batch, kv_cache.layers)
        model.compute_logits(hidden[-sequences:])
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
