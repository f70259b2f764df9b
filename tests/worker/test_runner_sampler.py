"""Sampler: distributions against an exact oracle, seeds, penalties, log-probabilities, masks."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams
from worker.request import Request
from worker.runner.draw import smallest_kept, uniform
from worker.runner.sampler import NOT_FINITE, Sampler

CPU = torch.device("cpu")
V = 40


def make_sampler(vocab: int = V, limit: int | None = None) -> Sampler:
    return Sampler(vocab, limit or vocab, CPU)


def request(params: SamplingParams, row: int = 0, seed: int = 0, prompt=(1, 2), outputs=()) -> Request:
    message = EngineRequest(f"r{row}", list(prompt), params, seed)
    made = Request(message, max_model_len=10_000, eos_token_ids=frozenset({0}), number=row)
    made.tokens += outputs
    made.row = row
    made.pending = 1  # as the scheduler has it when a step is launched
    return made


def oracle(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """The distribution by definition: sort, cut, renormalise."""
    probs = torch.softmax(logits.double() / p.temperature, -1)
    order = probs.argsort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if p.top_k > 0:
        keep[order[p.top_k :]] = False
    if p.top_p < 1:
        ranked = probs[order] * keep[order]
        before = (ranked / ranked.sum()).cumsum(-1) - ranked / ranked.sum()
        keep[order[before >= p.top_p]] = False
    if p.min_p > 0:
        keep &= probs >= p.min_p * probs.max()
    probs = probs * keep
    return probs / probs.sum()


def changed(params: SamplingParams) -> dict[str, object]:
    """The parameters that aren't the defaults."""
    return dict(msgspec.to_builtins(params))


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.3, top_p=0.5, top_k=7),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=1),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: repr(changed(params)))
def test_distribution(params: SamplingParams):
    """Chi-square over 8,000 draws with fixed seeds; p = 0.001 for the degrees of freedom at hand."""
    torch.manual_seed(1)
    logits = torch.randn(V) * 2
    want = oracle(logits, params)
    sampler = make_sampler()
    counts = torch.zeros(V)
    for base in range(0, 8_000, 2000):
        rows = [request(params, row=i, seed=base + i) for i in range(2000)]
        tokens, _ = sampler.sample(logits.repeat(2000, 1), rows).read()
        counts += torch.bincount(torch.tensor(tokens), minlength=V)
    assert counts[want == 0].sum() == 0
    kept = want * 8_000 >= 5
    statistic = float((((counts - want * 8_000) ** 2) / (want * 8_000))[kept].sum())
    freedom = max(1, int(kept.sum()) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.29 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert statistic < limit


def test_uniform_is_uniform_and_independent_over_positions():
    draws = torch.tensor([[uniform(seed, position) for position in range(50)] for seed in range(400)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.01
    assert abs(float(draws.var()) - 1 / 12) < 0.005
    correlation = torch.corrcoef(torch.stack([draws[:, :-1].flatten(), draws[:, 1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.03
    correlation = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_a_seed_gives_the_same_alone_and_in_a_batch_of_64():
    torch.manual_seed(2)
    logits = torch.randn(64, 1000)
    mixed = [
        SamplingParams(temperature=0.2 + i % 7 / 4, top_p=0.5 + i % 5 / 10, top_k=i % 9, min_p=i % 3 / 50)
        for i in range(63)
    ]
    rows = [request(p, row=i, seed=i * 7) for i, p in enumerate([*mixed, SamplingParams(temperature=0)])]
    together, _ = make_sampler(vocab=1000).sample(logits.clone(), rows).read()
    alone = [
        make_sampler(vocab=1000).sample(logits[i : i + 1].clone(), [r]).read()[0][0]
        for i, r in enumerate(rows)
    ]
    assert together == alone


def test_the_draw_depends_on_the_position():
    logits = torch.zeros(1, 1000)
    params = SamplingParams(temperature=1.0)
    tokens = {
        make_sampler(vocab=1000).sample(logits.clone(), [request(params, outputs=[5] * n)]).read()[0][0]
        for n in range(30)
    }
    assert len(tokens) > 25


def test_greedy_below_1e_5():
    logits = torch.randn(1, V)
    for temperature in (0.0, 9e-6):
        row = request(SamplingParams(temperature=temperature))
        assert make_sampler().sample(logits.clone(), [row]).read()[0] == [int(logits.argmax())]


@pytest.mark.parametrize("penalty", [0.3, 1.7])
def test_penalties_are_those_of_transformers_and_openai(penalty: float):
    """Rows with and without, whose batch rows aren't their places."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, V, generator=generator) * 3
    prompt, outputs = [1, 2, 3], [3, 4, 4]
    all_three = SamplingParams(
        temperature=0, repetition_penalty=penalty, presence_penalty=0.9, frequency_penalty=-0.4
    )
    rows = [
        request(SamplingParams(temperature=0), row=5),
        request(all_three, row=2, prompt=prompt, outputs=outputs),
        request(SamplingParams(temperature=0, repetition_penalty=penalty), row=0, prompt=prompt),
    ]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    want = logits.clone()
    want[1:2] = processor(torch.tensor([prompt + outputs]), logits[1:2].clone())
    want[2:3] = processor(torch.tensor([prompt]), logits[2:3].clone())
    for token in set(outputs):
        want[1, token] -= 0.9 - 0.4 * outputs.count(token)
    sampler = make_sampler()
    sampler.begin(rows)
    sampler.sample(logits, rows)
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)


def test_counts_follow_what_was_sampled_without_reading_it_back():
    """A strong presence penalty must bite on the very next step."""
    logits = torch.zeros(1, V)
    logits[0, 5], logits[0, 6] = 3.0, 2.5
    row = request(SamplingParams(temperature=0, presence_penalty=2.0))
    sampler = make_sampler()
    sampler.begin([row])
    assert [sampler.sample(logits.clone(), [row]).read()[0][0] for _ in range(2)] == [5, 6]


def test_a_row_taken_over_starts_with_its_own_counts():
    sampler = make_sampler()
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    first = request(params, row=3, outputs=[5, 5, 6])
    sampler.begin([first])
    second = request(params, row=3)
    sampler.begin([second])
    logits = torch.zeros(1, V)
    logits[0, 5] = 1.0
    assert sampler.sample(logits, [second]).read()[0] == [5]


def take(sampler: Sampler, logits: torch.Tensor, rows: list[Request]) -> list[int]:
    """The tokens of a first step of these requests."""
    sampler.begin(rows)
    return sampler.sample(logits, rows).read()[0]


def test_logit_bias_and_min_tokens():
    logits = torch.zeros(1, V)
    logits[0, 0] = 5.0  # the end-of-sequence token
    row = request(SamplingParams(temperature=0, min_tokens=1, logit_bias={7: 50.0}))
    assert take(make_sampler(), logits.clone(), [row]) == [7]
    row = request(SamplingParams(temperature=0, min_tokens=1))
    assert take(make_sampler(), logits.clone(), [row]) != [0]
    row = request(SamplingParams(temperature=0, min_tokens=1), outputs=[9])
    assert take(make_sampler(), logits.clone(), [row]) == [0]


def test_padded_vocabulary_rows_are_never_sampled():
    bias = dict.fromkeys(range(30, V), 100.0)
    for temperature in (0.0, 1.0):
        rows = [
            request(SamplingParams(temperature=temperature, logit_bias=bias), row=i, seed=i)
            for i in range(64)
        ]
        logits = torch.zeros(64, V)
        logits[:, 30:] = 100.0
        assert max(take(make_sampler(limit=30), logits, rows)) < 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_reported_and_hurts_no_other(temperature: float, poison: float):
    logits = torch.zeros(3, V)
    logits[1, 4] = poison
    logits[2, 6] = 90.0
    rows = [request(SamplingParams(temperature=temperature), row=i, seed=i) for i in range(3)]
    tokens, _ = make_sampler().sample(logits, rows).read()
    assert tokens[1] == NOT_FINITE
    assert tokens[0] >= 0
    assert tokens[2] == 6


def test_logprobs_are_of_the_raw_logits():
    torch.manual_seed(4)
    logits = torch.randn(3, V)
    rows = [
        request(SamplingParams(temperature=0, logprobs=3, logit_bias={8: 100.0}), row=0),
        request(SamplingParams(temperature=0), row=1),
        request(SamplingParams(temperature=0, logprobs=0), row=2),
    ]
    sampler = make_sampler()
    sampler.begin(rows)
    tokens, entries = sampler.sample(logits.clone(), rows).read()
    first, second, third = entries
    want = torch.log_softmax(logits[0], -1)
    assert tokens[0] == 8
    assert first is not None
    assert first.token_id == 8
    assert first.logprob == pytest.approx(float(want[8]), abs=1e-5)
    assert first.rank == int((want > want[8]).sum()) + 1
    assert [i for i, _ in first.top] == want.topk(3).indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(want.topk(3).values.tolist(), abs=1e-5)
    assert second is None
    assert third is not None
    assert third.top == []


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 300, 1000])
def test_the_first_guess_and_the_full_sort_agree(top_p: float, top_k: int):
    torch.manual_seed(5)
    probs = torch.softmax(torch.randn(6, 1000) * torch.tensor([[0.1], [0.5], [1], [2], [4], [8]]), -1)
    k, p = torch.full((6, 1), float(top_k)), torch.full((6, 1), top_p)
    exact, certain = smallest_kept(probs.sort(descending=True).values, k, p, complete=True)
    assert certain.all()
    guess = max(256, top_k)
    quick, certain = smallest_kept(probs.topk(guess).values, k, p, complete=guess == 1000)
    assert torch.equal(quick[certain], exact[certain])


def test_a_row_that_adjustments_push_out_of_float32_is_reported():
    logits = torch.full((2, V), 3e38)
    rows = [request(SamplingParams(temperature=0, repetition_penalty=0.01), row=i) for i in range(2)]
    sampler = make_sampler()
    sampler.begin(rows)
    logits[1] = 0.0
    tokens, _ = sampler.sample(logits, rows).read()
    assert tokens[0] == NOT_FINITE
    assert tokens[1] >= 0
