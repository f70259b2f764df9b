"""The draw at evenly spaced numbers: how often each token comes is its probability, to one count. What the
probabilities should be, transformers' own warpers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker.params import SamplingParams
from worker.runner.draw import argmax, draw

N = 2000


def expected(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [V], in float64, of one row of logits."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(warpers(torch.zeros(1, 1), logits[None].double())[0], -1)


@pytest.mark.parametrize(("vocabulary", "spread"), [(40, 2.0), (700, 0.3), (700, 8.0)])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.1, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (0.7, 300, 1.0, 0.0),
        (1.0, 0, 0.05, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 0.999, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 0, 1.0, 1.0),
        (1.3, 7, 0.5, 0.0),
        (0.9, 0, 0.95, 0.02),
        (0.9, 20, 1.0, 0.02),
        (0.9, 20, 0.95, 0.02),
    ],
)
def test_every_token_comes_as_often_as_it_should(
    temperature: float, top_k: int, top_p: float, min_p: float, vocabulary: int, spread: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
    want = expected(logits, params) * N
    tokens = draw(logits.expand(N, -1), [params] * N, (np.arange(N) + 0.5) / N)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert counts[want == 0].sum() == 0
    assert float((counts - want).abs().max()) < 1.01


def test_the_ends_of_the_interval() -> None:
    """The first and the last token that can come, with others of probability 0 around them."""
    logits = torch.full((2, 64), -torch.inf)
    logits[:, [3, 9, 60]] = 0.0
    draws = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert draw(logits, [SamplingParams()] * 2, draws).tolist() == [3, 60]


@pytest.mark.parametrize("columns", [40, 64, 4096, 49_152])
def test_the_likeliest_is_the_first_of_equals(columns: int) -> None:
    logits = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    logits[0], logits[1] = 0.0, -torch.inf
    assert argmax(logits).tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
