"""Sampler: logits to tokens.

Order as in vLLM: bias and penalties (worker/runner/penalties.py), then what may not be sampled
(worker/runner/masks.py) and what the answer's form allows (worker/runner/form_masks.py), then temperature,
then top-k, top-p and min-p on the probabilities, then one draw (kernels/sampling.py on a GPU,
worker/runner/draw.py on a CPU). Log-probabilities are those before all that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import sample_triton
from worker.ipc.messages import TokenLogprob
from worker.request import Request
from worker.runner.draw import argmax, draw, uniforms
from worker.runner.form_masks import FormMask, compile_form_masks
from worker.runner.masks import Masks
from worker.runner.penalties import Penalties
from worker.runner.transfer import to_device, to_host

NOT_FINITE = -1  # instead of a token: the model produced NaN or infinity
NOTHING_LEFT = -2  # instead of a token: all are masked


class Sampled:
    """One step's tokens [R] on the device, and what was asked about them, on their way to the host.

    The copies are queued at once: reading later waits for this step only, not for one launched since.
    """

    def __init__(self, tokens: Tensor, logprobs: _Logprobs | None) -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        columns = [tokens, *(logprobs.columns if logprobs is not None else ())]
        self._host = [to_host(column) for column in columns]
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Tokens, and log-probabilities where they were asked for. Waits for the step."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, *columns = (column.tolist() for column in self._host)
        entries: list[TokenLogprob | None] = [None] * len(tokens)
        if self._logprobs is not None:
            for place, count, *values in zip(self._logprobs.places, self._logprobs.counts, *columns):
                token, chosen, rank, top_ids, top_values = values
                top = list(zip(top_ids[:count], top_values[:count]))
                entries[place] = TokenLogprob(token, chosen, rank, top)
        return tokens, entries


@dataclass(slots=True)
class _Logprobs:
    """For the rows at `places`: `counts` alternatives asked for; columns token, log-probability, rank, top
    ids, top log-probabilities."""

    places: list[int]
    counts: list[int]
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Sampler:
    """Samples for rows of the batch.

    Args:
        vocab_limit: ids from here on are padding of the output layer.
        last_tokens: see Masks.
    """

    def __init__(
        self,
        vocab_size: int,
        vocab_limit: int,
        device: torch.device,
        last_tokens: Tensor | None = None,
    ) -> None:
        self.device = device
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit
        self._penalties = Penalties(vocab_size, vocab_limit, device)
        self._masks = Masks(vocab_size, device, last_tokens)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what nearly every request needs: the first one would wait seconds for it."""
        if self.device.type == "cuda":
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self.device)
            params = torch.tensor([[0.7, 0.9, 0.0, 40.0]], device=self.device)
            draws = torch.zeros(1, dtype=torch.float64, device=self.device)
            sample_triton(logits, self._vocab_limit)
            sample_triton(logits, self._vocab_limit, params, draws)
            compile_form_masks(logits)

    def begin(self, requests: list[Request]) -> None:
        """These requests just got their rows."""
        for request in requests:
            if request.shaped_for:
                self._penalties.begin(request)
                self._masks.begin(request)

    def sample(self, logits: Tensor, requests: list[Request], form: FormMask | None = None) -> Sampled:
        """One token for each row of `logits` [R, vocab], which may be changed in place; `form` for those
        whose answers must have one."""
        wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        shaped = [i for i, r in enumerate(requests) if r.shaped_for and r.position < r.shaped_for]
        if wanted or shaped or not logits.is_cuda:
            logits = logits.float()
            if self._vocab_limit < self._vocab_size:
                logits[:, self._vocab_limit :] = -torch.inf
        raw = torch.log_softmax(self._pick(logits, wanted), dim=-1) if wanted else None
        changed = [requests[i] for i in shaped]
        if shaped:
            self._penalties.apply(logits, shaped, changed)
            self._masks.apply(logits, shaped, changed)
        if form is not None:
            form.apply(logits)
        top = logits.amax(dim=-1) if shaped or not logits.is_cuda else None
        tokens = self._choose_on_gpu(logits, requests) if logits.is_cuda else self._choose(logits, requests)
        if top is not None:
            tokens = torch.where(torch.isfinite(top), tokens, NOT_FINITE)
            if shaped:
                tokens = torch.where(top == -torch.inf, NOTHING_LEFT, tokens)
        if shaped:
            self._penalties.count(tokens.clamp(min=0), shaped, changed)
        logprobs = self._logprobs(raw, tokens.clamp(min=0), wanted, requests) if raw is not None else None
        return Sampled(tokens, logprobs)

    def _pick(self, rows: Tensor, places: list[int]) -> Tensor:
        """The rows at `places`."""
        if len(places) == len(rows):
            return rows
        return rows[to_device(torch.tensor(places), self.device)]

    def _choose_on_gpu(self, logits: Tensor, requests: list[Request]) -> Tensor:
        if all(r.params.greedy for r in requests):
            return sample_triton(logits, self._vocab_limit)
        columns = [
            (0.0 if p.greedy else p.temperature, p.top_p, p.min_p, max(0, p.top_k))
            for p in (r.params for r in requests)
        ]
        draws = uniforms([r.seed for r in requests], [r.position for r in requests])
        params = to_device(torch.tensor(columns, dtype=torch.float32), self.device)
        return sample_triton(
            logits, self._vocab_limit, params, to_device(torch.from_numpy(draws), self.device)
        )

    def _choose(self, logits: Tensor, requests: list[Request]) -> Tensor:
        random = [i for i, r in enumerate(requests) if not r.params.greedy]
        if len(random) == len(requests):
            return self._draw(logits, requests)
        tokens = argmax(logits)
        if random:
            tokens[random] = self._draw(logits[random], [requests[i] for i in random])
        return tokens

    def _draw(self, logits: Tensor, requests: list[Request]) -> Tensor:
        draws = uniforms([r.seed for r in requests], [r.position for r in requests])
        return draw(logits, [r.params for r in requests], draws)

    def _logprobs(self, raw: Tensor, tokens: Tensor, places: list[int], requests: list[Request]) -> _Logprobs:
        counts = [requests[i].params.logprobs or 0 for i in places]
        taken = self._pick(tokens, places)
        chosen = raw.gather(1, taken[:, None])
        ranks = (raw > chosen).sum(dim=-1) + 1
        values, ids = raw.topk(max(1, max(counts)), dim=-1)
        return _Logprobs(places, counts, (taken, chosen.squeeze(1), ranks, ids, values))
