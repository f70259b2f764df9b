from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

LIMIT = 190


def reference(row: Tensor, temperature: float, top_p: float, min_p: float, top_k: int, u: float) -> int:
    """By sorting, in float64."""
    row = row[:LIMIT].double()
    if not torch.isfinite(row.max()):
        return -1
    if temperature == 0:
        return int(row.argmax())
    weights = torch.exp((row - row.max()) / temperature)
    ranked = weights.sort(descending=True).values[: top_k if 0 < top_k < LIMIT else LIMIT]
    enough = (ranked.cumsum(0) >= top_p * ranked.sum()).nonzero()
    threshold = ranked[int(enough[0])] if top_p < 1 and len(enough) else ranked[-1]
    kept = (weights >= threshold) & (weights >= min_p)
    running = (weights * kept).cumsum(0)
    return int(((running > u * running[-1]) & kept).nonzero()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_tokens_are_those_of_a_sort(
    interpreted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, spread: float
) -> None:
    """With room for few candidates, so that both the list and the whole row are searched."""
    monkeypatch.setattr(interpreted.sampling, "BLOCK", 64)
    monkeypatch.setattr(interpreted.sampling, "CANDIDATES", 32)
    torch.manual_seed(1)
    rng = random.Random(2)
    logits = (torch.randn(5, 200) * spread).to(dtype)
    logits[:, LIMIT:] = 50.0
    logits[1, 3] = torch.nan
    params = [
        (
            rng.choice([0.0, 0.5, 2.0]),
            rng.choice([1.0, 0.9, 0.2]),
            rng.choice([0.0, 0.1]),
            rng.choice([0, 1, 5, 100]),
        )
        for _ in range(8)
    ]
    u = torch.rand(5, dtype=torch.float64)
    got = interpreted.sampling.sample_triton(logits, LIMIT, torch.tensor(params), u)
    assert got.tolist() == [reference(row, *p, float(v)) for row, p, v in zip(logits, params, u)]
    greedy = interpreted.sampling.sample_triton(logits, LIMIT)
    assert greedy.tolist() == [reference(row, 0, 1, 0, 0, 0) for row in logits]
