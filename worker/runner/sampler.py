"""Sampler: logits to tokens.

Order as in vLLM: bias and penalties, then temperature, then top-k, top-p and min-p on the probabilities, then
one draw. The draw inverts the cumulative distribution in vocabulary order at u(seed, position): one number a
token, so neither the batch, nor preemption, nor the device changes what a seed gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import sample_triton
from worker.ipc.messages import TokenLogprob
from worker.params import SamplingParams
from worker.request import Request
from worker.runner.transfer import to_device, to_host

_M64 = (1 << 64) - 1
_FIRST_GUESS = 256  # likeliest tokens looked at before sorting a whole vocabulary for top-p
NOT_FINITE = -1  # instead of a token: the model produced NaN or infinity


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Numbers in [0, 1), float64, from 53 bits of splitmix64 over each (seed, position)."""
    z = np.array([seed & _M64 for seed in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
    for _ in range(2):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)) / (1 << 53)


def uniform(seed: int, position: int) -> float:
    """The number for one (seed, position)."""
    return float(uniforms([seed], [position])[0])


def _argmax(logits: Tensor) -> Tensor:
    """The first of the largest in each row [R, V] -> [R]: by blocks, as amax is vectorised on a CPU and
    argmax is not (16 rows of 49,152: 0.2 ms for 1.0)."""
    rows, columns = logits.shape
    width = math.gcd(columns, 1024)
    if width < 32 or not logits.is_contiguous():
        return logits.argmax(dim=-1)
    blocks = logits.view(rows, -1, width)
    block = blocks.amax(dim=2).argmax(dim=1)
    return block * width + blocks[torch.arange(rows), block].argmax(dim=1)


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


def _uses_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def _adjusts(request: Request) -> bool:
    """Whether the request changes its logits before the draw."""
    params = request.params
    return (
        bool(params.logit_bias)
        or _uses_penalties(params)
        or (_position(request) < params.min_tokens and bool(request.stop_tokens))
    )


def _position(request: Request) -> int:
    """Place in the answer, from 0, of the token being sampled: the scheduler has counted it as pending
    already."""
    return request.output_length - 1


class Sampler:
    """Samples for rows of the batch; token counts for penalties live on the device, a row for each
    sequence."""

    def __init__(self, max_num_seqs: int, vocab_size: int, vocab_limit: int, device: torch.device) -> None:
        self.device = device
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit  # ids from here on are padding of the output layer
        self._max_num_seqs = max_num_seqs
        self._output_counts: Tensor | None = None  # [max_num_seqs, vocab] int32, made when first needed
        self._prompt_seen: Tensor | None = None  # [max_num_seqs, vocab] bool

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what nearly every request needs: the first one would wait seconds for it."""
        if self.device.type == "cuda":
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self.device)
            params = torch.tensor([[0.7, 0.9, 0.0, 40.0]], device=self.device)
            draws = torch.zeros(1, dtype=torch.float64, device=self.device)
            sample_triton(logits, self._vocab_limit)
            sample_triton(logits, self._vocab_limit, params, draws)

    def begin(self, requests: list[Request]) -> None:
        """These requests just got their rows: count the tokens they bring."""
        for request in requests:
            if _uses_penalties(request.params):
                self._count_tokens(request)

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """One token for each row of `logits` [R, vocab], which may be changed in place."""
        wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        adjusted = any(_adjusts(r) for r in requests)
        if wanted or adjusted or not logits.is_cuda:
            logits = logits.float()
            if self._vocab_limit < self._vocab_size:
                logits[:, self._vocab_limit :] = -torch.inf
        raw = torch.log_softmax(self._pick(logits, wanted), dim=-1) if wanted else None
        if adjusted:
            self._adjust(logits, requests)
        finite = torch.isfinite(logits.amax(dim=-1)) if adjusted or not logits.is_cuda else None
        tokens = self._choose_on_gpu(logits, requests) if logits.is_cuda else self._choose(logits, requests)
        if finite is not None:
            tokens = torch.where(finite, tokens, NOT_FINITE)
        known = tokens.clamp(min=0)
        self._count_sampled(known, requests)
        logprobs = self._logprobs(raw, known, wanted, requests) if raw is not None else None
        return Sampled(tokens, logprobs)

    def _pick(self, rows: Tensor, places: list[int]) -> Tensor:
        return rows if len(places) == len(rows) else rows[places]

    # ---- bias and penalties

    def _adjust(self, logits: Tensor, requests: list[Request]) -> None:
        for i, request in enumerate(requests):
            params = request.params
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=self.device)
                bias = torch.tensor(list(params.logit_bias.values()), device=self.device)
                real = ids < self._vocab_limit
                logits[i, ids[real]] += bias[real]
            if _position(request) < params.min_tokens and request.stop_tokens:
                logits[i, [t for t in request.stop_tokens if t < self._vocab_size]] = -torch.inf
        places = [i for i, r in enumerate(requests) if _uses_penalties(r.params)]
        if places:
            self._penalise(logits, places, [requests[i] for i in places])

    def _penalise(self, logits: Tensor, places: list[int], requests: list[Request]) -> None:
        """Repetition (arXiv 1909.05858): divide positive, multiply negative logits of tokens seen in prompt
        or output; presence and frequency (OpenAI): subtract for tokens of the output, once and as often as
        they came."""
        assert self._output_counts is not None
        assert self._prompt_seen is not None
        rows = torch.tensor([r.row for r in requests], device=self.device)
        counts = self._output_counts[rows]
        present = counts > 0
        repetition, presence, frequency = self._columns(
            [
                (r.params.repetition_penalty, r.params.presence_penalty, r.params.frequency_penalty)
                for r in requests
            ]
        )
        chosen = logits[places]
        factor = torch.where(present | self._prompt_seen[rows], repetition, 1.0)
        chosen = torch.where(chosen > 0, chosen / factor, chosen * factor)
        logits[places] = chosen - frequency * counts - presence * present

    def _count_tokens(self, request: Request) -> None:
        if self._output_counts is None or self._prompt_seen is None:
            shape = (self._max_num_seqs, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        tokens = torch.tensor(request.tokens, device=self.device)
        prompt, output = tokens[: request.prompt_length], tokens[request.prompt_length :]
        self._prompt_seen[request.row] = False
        self._prompt_seen[request.row, prompt] = True
        self._output_counts[request.row] = torch.bincount(output, minlength=self._vocab_size)

    def _count_sampled(self, tokens: Tensor, requests: list[Request]) -> None:
        places = [i for i, r in enumerate(requests) if _uses_penalties(r.params)]
        if places:
            assert self._output_counts is not None
            rows = torch.tensor([requests[i].row for i in places], device=self.device)
            self._output_counts[rows, tokens[places]] += 1

    def _columns(self, values: list[tuple[float, ...]]) -> tuple[Tensor, ...]:
        """Columns [R, 1] of per-row numbers."""
        columns = torch.tensor(values, dtype=torch.float32, device=self.device)
        return columns.tensor_split(len(values[0]), dim=1)

    # ---- the draw

    def _choose_on_gpu(self, logits: Tensor, requests: list[Request]) -> Tensor:
        if all(r.params.greedy for r in requests):
            return sample_triton(logits, self._vocab_limit)
        columns = [
            (0.0 if p.greedy else p.temperature, p.top_p, p.min_p, max(0, p.top_k))
            for p in (r.params for r in requests)
        ]
        draws = uniforms([r.seed for r in requests], [_position(r) for r in requests])
        params = to_device(torch.tensor(columns, dtype=torch.float32), self.device)
        return sample_triton(
            logits, self._vocab_limit, params, to_device(torch.from_numpy(draws), self.device)
        )

    def _choose(self, logits: Tensor, requests: list[Request]) -> Tensor:
        random = [i for i, r in enumerate(requests) if not r.params.greedy]
        if len(random) == len(requests):
            return self._draw(logits, requests)
        tokens = _argmax(logits)
        if random:
            tokens[random] = self._draw(logits[random], [requests[i] for i in random])
        return tokens

    def _draw(self, logits: Tensor, requests: list[Request]) -> Tensor:
        temperature, top_p, min_p, top_k = self._columns(
            [(r.params.temperature, r.params.top_p, r.params.min_p, float(r.params.top_k)) for r in requests]
        )
        probs = torch.softmax(logits / temperature, dim=-1)
        self._keep_likeliest(probs, top_k, top_p, requests)
        if any(r.params.min_p > 0 for r in requests):
            probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        draws = uniforms([r.seed for r in requests], [_position(r) for r in requests])
        total = cumulative[:, -1:]
        target = torch.from_numpy(draws)[:, None] * total
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
        # `right`: the first token whose cumulative probability is above the target, so never one of
        # probability 0.
        return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=self._vocab_limit - 1)

    def _keep_likeliest(self, probs: Tensor, top_k: Tensor, top_p: Tensor, requests: list[Request]) -> None:
        """Set to 0, in place, what top-k and then top-p leave out. Ties with the last one kept stay."""
        limited = [i for i, r in enumerate(requests) if r.params.top_k > 0 or r.params.top_p < 1]
        if not limited:
            return
        chosen, top_k, top_p = probs[limited], top_k[limited], top_p[limited]
        width = self._vocab_size
        largest_k = max(requests[i].params.top_k for i in limited)
        guess = min(width, max(_FIRST_GUESS, largest_k))
        values = chosen.topk(guess, dim=-1).values
        threshold, found = _threshold(values, top_k, top_p, complete=guess == width)
        if not bool(found.all()):
            values = chosen.sort(dim=-1, descending=True).values
            threshold, _ = _threshold(values, top_k, top_p, complete=True)
        probs[limited] = chosen.masked_fill(chosen < threshold, 0.0)

    # ---- log-probabilities

    def _logprobs(self, raw: Tensor, tokens: Tensor, places: list[int], requests: list[Request]) -> _Logprobs:
        counts = [requests[i].params.logprobs or 0 for i in places]
        taken = self._pick(tokens, places)
        chosen = raw.gather(1, taken[:, None])
        ranks = (raw > chosen).sum(dim=-1) + 1
        values, ids = raw.topk(max(1, max(counts)), dim=-1)
        return _Logprobs(places, counts, (taken, chosen.squeeze(1), ranks, ids, values))


def _threshold(values: Tensor, top_k: Tensor, top_p: Tensor, *, complete: bool) -> tuple[Tensor, Tensor]:
    """Smallest probability kept [R, 1] given the likeliest ones in descending order, and whether that is
    certain [R, 1]."""
    width = values.shape[1]
    last = torch.where(top_k > 0, top_k, float(width)).long().clamp_(max=width) - 1
    kept = torch.arange(width, device=values.device) <= last
    mass = torch.where(kept, values, 0.0).cumsum(dim=-1)
    # top-p is taken of what top-k left. Where neither ends within `values`, only a full sort can tell the
    # mass.
    bounded = (top_k > 0) & (top_k <= width)
    total = torch.where(bounded, mass[:, -1:], 1.0)
    enough = mass >= top_p * total
    by_mass = torch.where(top_p < 1, width - enough.sum(dim=-1, keepdim=True), width - 1)
    end = torch.minimum(last, by_mass.clamp_(max=width - 1))
    certain = bounded | enough.any(dim=-1, keepdim=True) & (top_p < 1)
    return values.gather(1, end), certain | complete
