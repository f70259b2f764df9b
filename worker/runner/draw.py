"""The draw in plain torch, as a CPU makes it; on a GPU it is kernels/sampling.py.

It inverts the cumulative distribution in vocabulary order at u(seed, position): one number a token, so
neither the batch, nor preemption, nor the device changes what a seed gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.params import SamplingParams

_M64 = (1 << 64) - 1
_FIRST_GUESS = 256  # likeliest tokens looked at before sorting a whole vocabulary for top-p


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


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest in each row [R, V] -> [R]: by blocks, as amax is vectorised on a CPU and
    argmax is not (16 rows of 49,152: 0.2 ms for 1.0)."""
    rows, columns = logits.shape
    width = math.gcd(columns, 1024)
    if width < 32 or not logits.is_contiguous():
        return logits.argmax(dim=-1)
    blocks = logits.view(rows, -1, width)
    block = blocks.amax(dim=2).argmax(dim=1)
    return block * width + blocks[torch.arange(rows), block].argmax(dim=1)


def draw(logits: Tensor, params: Sequence[SamplingParams], draws: np.ndarray) -> Tensor:
    """A token [R] for each row of `logits` [R, V] (float32, on the host) at `draws` [R] in [0, 1)."""
    columns = torch.tensor(
        [(p.temperature, p.top_p, p.min_p, float(p.top_k)) for p in params], dtype=torch.float32
    )
    temperature, top_p, min_p, top_k = columns.tensor_split(4, dim=1)
    probs = torch.softmax(logits / temperature, dim=-1)
    _keep_likeliest(probs, top_k, top_p, params)
    if any(p.min_p > 0 for p in params):
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.from_numpy(draws)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # `right`: the first token whose cumulative probability is above the target, so never one of
    # probability 0. Beyond the last: the row isn't finite, whatever is drawn there.
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return found.clamp_(max=logits.shape[1] - 1)


def _keep_likeliest(probs: Tensor, top_k: Tensor, top_p: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to 0, in place, what top-k and then top-p leave out. Ties with the last one kept stay."""
    limited = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if not limited:
        return
    chosen, top_k, top_p = probs[limited], top_k[limited], top_p[limited]
    width = probs.shape[1]
    largest_k = max(params[i].top_k for i in limited)
    guess = min(width, max(_FIRST_GUESS, largest_k))
    values = chosen.topk(guess, dim=-1).values
    threshold, found = smallest_kept(values, top_k, top_p, complete=guess == width)
    if not bool(found.all()):
        values = chosen.sort(dim=-1, descending=True).values
        threshold, _ = smallest_kept(values, top_k, top_p, complete=True)
    probs[limited] = chosen.masked_fill(chosen < threshold, 0.0)


def smallest_kept(values: Tensor, top_k: Tensor, top_p: Tensor, *, complete: bool) -> tuple[Tensor, Tensor]:
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
