"""The sampling kernel against the sampler's own torch path, which the CPU tests hold to an exact oracle."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from kernels.sampling import CANDIDATES, sample_triton
from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams
from worker.request import Request
from worker.runner.prompt_logprobs import Piece, PromptScorer
from worker.runner.sampler import NOT_FINITE, Sampler

pytestmark = pytest.mark.gpu
VOCAB = 20_011
LIMIT = 20_000


def requests(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.8]),
            top_p=rng.choice([1.0, 0.95, 0.9, 0.5, 0.05]),
            top_k=rng.choice([0, 0, 1, 5, 50, 300, CANDIDATES, 5000, VOCAB]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
        )
        request = Request(
            EngineRequest(str(i), [1, 2], params, seed * 1000 + i),
            max_model_len=1000, eos_token_ids=frozenset(), number=i,
        )  # fmt: skip
        request.row, request.pending = i, 1
        made.append(request)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 0.2, 1.5, 6.0])
def test_same_tokens_as_on_the_cpu(dtype: torch.dtype, spread: float):
    """Peaked, flat and entirely equal logits: from lists of candidates and from whole rows."""
    torch.manual_seed(int(spread * 10))
    logits = (torch.randn(256, VOCAB) * spread).to(dtype)
    logits[:, LIMIT:] = 90.0
    logits[7, 100:] = -torch.inf
    rows = requests(256, seed=int(spread * 10))
    want, _ = Sampler(VOCAB, LIMIT, torch.device("cpu")).sample(logits.float(), rows).read()
    got, _ = Sampler(VOCAB, LIMIT, torch.device("cuda")).sample(logits.cuda(), rows).read()
    # Sums in another order: a draw, or a share of the mass, within a rounding of the edge may fall the other
    # way.
    assert sum(a != b for a, b in zip(got, want)) <= 3
    assert max(got) < LIMIT
    greedy = [i for i, r in enumerate(rows) if r.params.greedy]
    assert [got[i] for i in greedy] == [want[i] for i in greedy]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_are_reported_and_hurt_no_other(poison: float, temperature: float):
    logits = torch.zeros(64, VOCAB, device="cuda")
    logits[:, 6] = 90.0
    bad = range(1, 64, 3)
    for i in bad:
        logits[i, i * 300 if math.isnan(poison) or poison > 0 else slice(None)] = poison
    params = torch.tensor([[temperature, 0.9, 0.0, 40.0]], device="cuda").repeat(64, 1)
    u = torch.linspace(0, 0.999, 64, dtype=torch.float64, device="cuda")
    tokens = sample_triton(logits, LIMIT, params, u).tolist()
    assert tokens == [NOT_FINITE if i in bad else 6 for i in range(64)]


def test_greedy_takes_the_first_of_equals_and_nothing_beyond_the_limit():
    logits = torch.zeros(3, VOCAB, device="cuda", dtype=torch.bfloat16)
    logits[0, LIMIT:] = 5.0
    logits[1, [9_000, 17_000]] = 3.0
    logits[2, LIMIT - 1] = 1.0
    assert sample_triton(logits, LIMIT).tolist() == [0, 9_000, LIMIT - 1]


def test_sampling_never_waits_for_the_device():
    rows = requests(32, seed=5)
    sampler = Sampler(VOCAB, LIMIT, torch.device("cuda"))
    logits = torch.randn(32, VOCAB, device="cuda").bfloat16()
    sampler.sample(logits, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def shaped_requests(count: int, temperature: float = 0.0) -> list[Request]:
    """Requests with bias, penalties and masks of every kind, in rows of their own; some have an unread
    token."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        ids = rng.sample(range(LIMIT), 600)
        params = SamplingParams(
            temperature=temperature,
            logit_bias=dict.fromkeys(ids[:40], rng.choice([-3.0, 4.0])) if i % 2 else {},
            repetition_penalty=rng.choice([1.0, 1.5]),
            frequency_penalty=rng.choice([0.0, 1.0]),
            allowed_token_ids=tuple(ids) if i % 3 == 0 else None,
            bad_words_token_ids=((ids[0],), (5, ids[1]), (5, 6, ids[2])) if i % 5 else (),
            min_tokens=rng.choice([0, 9]),
            logprobs=rng.choice([None, 3]),
        )
        request = Request(
            EngineRequest(str(i), ids[:7], params, i),
            max_model_len=1000,
            eos_token_ids=frozenset({ids[3]}),
            number=i,
        )
        unread = i % 4 == 0
        request.tokens += [5] if unread else [5, 6]
        request.row, request.pending = count - 1 - i, 2 if unread else 1
        made.append(request)
    return made


def test_bias_penalties_and_masks_as_on_the_cpu():
    """Also with a token that only the device knows, which completes the start of some bad words."""
    rows = shaped_requests(64)
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    found = []
    for device in ("cpu", "cuda"):
        last = torch.full((64,), 6, device=device)
        sampler = Sampler(VOCAB, LIMIT, torch.device(device), last)
        sampler.begin(rows)
        changed = logits.clone().to(device)
        tokens, entries = sampler.sample(changed, rows).read()
        found.append((changed.cpu(), tokens, [entry and entry.token_id for entry in entries]))
    torch.testing.assert_close(found[1][0][:, :LIMIT], found[0][0][:, :LIMIT], atol=1e-4, rtol=1e-5)
    assert found[1][1:] == found[0][1:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shaping_never_waits_for_the_device(temperature: float):
    rows = shaped_requests(32, temperature)
    sampler = Sampler(VOCAB, LIMIT, torch.device("cuda"), torch.zeros(32, dtype=torch.int64, device="cuda"))
    logits = torch.randn(32, VOCAB, device="cuda").bfloat16()
    sampler.begin(rows)
    sampler.sample(logits, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.begin(rows)
        sampler.sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_prompt_logprobs_never_wait_for_the_device_and_are_the_cpu_s():
    weights = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(150, 64, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(prompt_logprobs=5)
    tokens = list(range(3, 3 + 151))
    found = []
    for device in ("cpu", "cuda"):
        request = Request(
            EngineRequest("r", tokens, params, 0), max_model_len=1000, eos_token_ids=frozenset(), number=0
        )
        scorer = PromptScorer(partial(linear, weight=weights.to(device)), VOCAB, LIMIT)
        scorer._rows = 64
        pieces = [Piece(request, 1, 150)]
        states = hidden.to(device)
        scorer.score(states, pieces)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            scored = scorer.score(states, pieces)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert scored is not None
        ((_, entries),) = scored.read()
        found.append(entries.entries(tokens))
    for mine, theirs in zip(*found, strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [v for _, v in mine.top] == pytest.approx([v for _, v in theirs.top], abs=1e-3)
