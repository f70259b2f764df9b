"""The scheduler, with a stand-in for the model: the next token is a function of all tokens before it."""

from __future__ import annotations

import random

import pytest

from tests.worker.scheduler_harness import PAGE, Blind, Harness, expected, outputs, prompts
from worker.request import AGEING, Request


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 16, 200])
@pytest.mark.parametrize("pages", [24, 200])
def test_tokens_depend_on_the_prompt_alone(depth: int, budget: int, pages: int):
    harness = Harness(pages=pages, seqs=8, budget=budget, depth=depth)
    requests = [harness.add(f"r{i}", prompt, 20) for i, prompt in enumerate(prompts(12))]
    harness.run()
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        assert outputs(request) == expected(prompt, 20)
        assert request.finish_reason == "length"
    assert (harness.scheduler.preemptions > 0) == (pages == 24)


def test_pages_are_taken_on_demand_and_decodes_come_first():
    harness = Harness(budget=8)
    first = harness.add("a", [1] * 4, 10)
    harness.step()
    assert len(first.pages) == 1
    harness.add("b", [2] * 30, 2)
    step = harness.step()
    assert [(row.request.id, row.decode, row.count) for row in step.rows] == [("a", True, 1), ("b", False, 7)]
    step = harness.step()
    assert [(row.request.id, row.count) for row in step.rows] == [("a", 1), ("b", 7)]
    assert len(first.pages) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_of_30000_tokens_takes_no_step_from_those_who_decode(depth: int):
    """The longest gap of a stream is one step, and no step is larger than the budget."""
    length, budget = 30_000, 512
    harness = Blind(pages=length // PAGE + 1000, seqs=8, budget=budget, depth=depth)
    streams = {harness.add(f"s{i}", [i] * 8, 200).id for i in range(5)}
    while streams != {row.request.id for row in harness.step().rows if row.decode}:
        pass
    long = harness.add("long", [i % 50 for i in range(length)], 1)
    steps = 0
    while long.finish_reason is None:
        step = harness.step()
        steps += 1
        assert {row.request.id for row in step.rows if row.decode} == streams
        assert step.num_tokens <= budget
    assert steps <= -(-length // (budget - len(streams))) + depth
    harness.run()


def test_a_prompt_is_not_split_when_chunking_is_off():
    harness = Harness(budget=8, chunked=False)
    request = harness.add("a", [1] * 30, 3)
    step = harness.step()
    assert [(row.count, row.sample) for row in step.rows] == [(30, True)]
    harness.run()
    assert outputs(request) == expected([1] * 30, 3)


def test_the_latest_is_preempted_and_the_earliest_never():
    harness = Harness(pages=12, seqs=4, budget=64)
    requests = [harness.add(f"r{i}", [i] * 8, 30) for i in range(3)]
    harness.step()
    first = requests[0]
    while first.finish_reason is None:
        harness.step()
        assert first.row >= 0 or first.finish_reason is not None
    harness.run()


def test_pool_for_one_and_a_half_requests_finishes_without_thrash():
    """Preempt and resume must not take turns for ever (vllm#25538): each request is preempted a few times at
    most."""
    harness = Harness(pages=1 + 15, seqs=4, budget=64)
    requests = [harness.add(f"r{i}", [i] * 20, 20) for i in range(6)]
    harness.run()
    assert harness.scheduler.preemptions <= 2 * len(requests)
    for i, request in enumerate(requests):
        assert outputs(request) == expected([i] * 20, 20)


def test_urgent_requests_go_first_and_old_ones_are_not_starved():
    harness = Harness(pages=64, seqs=1, budget=64)
    batch = harness.add("batch", [1, 2], 2, priority=5)
    harness.add("urgent", [3], 2, priority=0)
    assert harness.step().rows[0].request.id == "urgent"
    # A flood of urgent requests: the old one goes once it has waited for its five levels.
    for i in range(200):
        if batch.row >= 0 or batch.finish_reason:
            break
        harness.time += AGEING / 10
        harness.add(f"flood{i}", [i], 2, priority=0)
        harness.step()
    # One arrives a step and takes two: whoever came up to five levels later is served, then the old one is.
    assert batch.row >= 0 or batch.finish_reason
    assert i <= 2 * 5 * 10 + 2


def test_admission_never_preempts():
    harness = Harness(pages=8, seqs=4, budget=64)
    low = harness.add("low", [1] * 20, 4, priority=9)
    harness.step()
    harness.add("high", [2] * 20, 4, priority=0)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.preemptions == 0
    assert low.finish_reason == "length"
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_aborted_requests_give_their_pages_back_after_the_step_in_flight(depth: int):
    harness = Harness(depth=depth)
    request = harness.add("a", [1] * 10, 50)
    other = harness.add("b", [2] * 10, 12)
    for _ in range(3):
        harness.step()
    harness.scheduler.finish(request, "abort")
    if depth == 2:
        assert request.pages, "a step in flight still writes them"
    harness.run()
    assert request.pages == []
    assert outputs(other) == expected([2] * 10, 12)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_random_aborts_leak_nothing(depth: int, seed: int):
    rng = random.Random(seed)
    harness = Harness(pages=30, seqs=5, budget=12, depth=depth)
    alive: list[Request] = []
    done: list[Request] = []
    for i, prompt in enumerate(prompts(60, seed, longest=30)):
        alive.append(harness.add(f"r{i}", prompt, rng.randrange(1, 20), priority=rng.randrange(3)))
        for _ in range(rng.randrange(4)):
            harness.step()
        for request in list(alive):
            if request.finish_reason is not None:
                alive.remove(request)
                done.append(request)
            elif rng.random() < 0.1:
                harness.scheduler.finish(request, "abort")
                alive.remove(request)
    harness.run()
    for request in done + [r for r in alive if r.finish_reason == "length"]:
        prompt = request.tokens[: request.prompt_length]
        assert outputs(request) == expected(prompt, len(outputs(request)))


def test_stop_tokens_end_a_request_but_not_before_min_tokens():
    prompt = [7, 7, 7]
    tokens = expected(prompt, 12)
    stop = tokens[3]
    harness = Harness()
    plain = harness.add("a", prompt, 12, stop_token_ids=(stop,))
    harness.run()
    assert plain.finish_reason == "stop"
    assert outputs(plain) == tokens[: tokens.index(stop) + 1]


def test_nearly_all_of_the_pool_is_used_before_anybody_waits():
    harness = Harness(pages=1 + 1000, seqs=256, budget=4096)
    for i in range(256):
        harness.add(f"r{i}", [i % 50] * (6 * PAGE), 8)
    while harness.scheduler.waiting and harness.step().rows:
        if harness.scheduler.waiting and len(harness.scheduler.running) < 256:
            assert harness.pool.num_used >= 0.96 * harness.pool.capacity
            break
    else:
        raise AssertionError("nobody had to wait: the test shows nothing")


def test_slots_say_what_is_wasted():
    harness = Harness()
    harness.add("a", [1] * 9, 5)
    harness.step()
    assert harness.scheduler.slots() == (3 * PAGE, 9)
