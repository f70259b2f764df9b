"""Batch work beside interactive requests: what it gives up, and what it keeps."""

from __future__ import annotations

import random

import pytest

from tests.worker.scheduler_harness import Harness, expected, outputs, prompts
from worker.engine.classes import MOST_RECLAIMED
from worker.request import AGEING, CLASS_AGEING

HIGH, LOW = 0, 2


@pytest.mark.parametrize("depth", [1, 2])
def test_batch_work_gives_its_pages_to_interactive_requests_down_to_its_floor(depth: int):
    harness = Harness(pages=1 + 64, seqs=32, budget=400, depth=depth)
    batch = [harness.add(f"b{i}", [i % 50] * 20, 60, level=LOW) for i in range(12)]
    for _ in range(20):
        harness.step()
    assert harness.pool.num_free < 10
    urgent = [harness.add(f"u{i}", [40, i] * 24, 4, level=HIGH) for i in range(3)]
    harness.step()
    assert all(request.row >= 0 for request in urgent)
    assert any(request.row >= 0 for request in batch), "batch keeps an eighth"
    harness.run()
    for i, request in enumerate(batch):
        assert outputs(request) == expected([i % 50] * 20, 60)
    for i, request in enumerate(urgent):
        assert outputs(request) == expected([40, i] * 24, 4)


def test_batch_work_gives_its_rows_too():
    harness = Harness(pages=400, seqs=2, budget=64)
    batch = [harness.add(f"b{i}", [i], 50, level=LOW) for i in range(2)]
    harness.step()
    urgent = harness.add("u", [9], 3)
    harness.step()
    assert urgent.row >= 0
    assert [request.row >= 0 for request in batch] == [True, False]
    harness.run()
    assert outputs(batch[1]) == expected([1], 50)


def test_nobody_is_preempted_in_vain():
    harness = Harness(pages=1 + 30, seqs=8, budget=400)
    normal = harness.add("n", [1] * 80, 30)
    batch = harness.add("b", [2] * 12, 30, level=LOW)
    harness.step()
    harness.add("large", [3] * 60, 2)  # wouldn't fit in place of `b`
    for _ in range(5):
        harness.step()
    assert (normal.row >= 0, batch.row >= 0, harness.scheduler.preemptions) == (True, True, 0)
    harness.run()


def test_growing_batch_work_never_takes_pages_of_interactive_requests():
    harness = Harness(pages=1 + 24, seqs=8, budget=400)
    batch = [harness.add(f"b{i}", [i] * 8, 60, level=LOW) for i in range(3)]
    harness.step()
    harness.time += 10 * CLASS_AGEING  # however old it is
    urgent = harness.add("u", [7] * 8, 60, level=HIGH)
    harness.step()
    while urgent.finish_reason is None:
        assert urgent.row >= 0
        harness.step()
    assert harness.scheduler.preemptions > 0
    harness.run()
    assert all(request.finish_reason == "length" for request in batch)


def test_batch_work_ends_under_a_flood_of_interactive_requests():
    harness = Harness(pages=1 + 40, seqs=4, budget=64)
    batch = harness.add("b", [1] * 40, 60, level=LOW)
    number = 0
    while batch.finish_reason is None:
        harness.time += 0.5
        while len(harness.scheduler.waiting) < 6:
            number += 1
            harness.add(f"u{number}", [number % 50] * 30, 8, level=HIGH)
        harness.step()
        assert number < 5000, "batch work starves"
    assert outputs(batch) == expected([1] * 40, 60)
    assert batch.reclaimed <= MOST_RECLAIMED
    harness.run()


def test_what_was_preempted_in_a_step_does_not_start_again_in_it():
    """Two go for one, and the smaller fits again beside it; its last token is still on the device, in the row
    that it had."""
    harness = Harness(pages=1 + 60, seqs=16, budget=400, depth=2)
    harness.add("floor", [9] * 20, 60, level=LOW)
    large = harness.add("large", [1] * 100, 60, level=LOW, priority=1)
    harness.time += 1.1 * AGEING  # goes before the large one, once both wait anew
    small = harness.add("small", [2] * 12, 60, level=LOW)
    for _ in range(4):
        harness.step()
    harness.add("normal", [7] * 80, 60)
    for _ in range(3):
        harness.step()
    assert (small.pending, large.pending, harness.pool.num_free) == (1, 1, 0)
    urgent = [harness.add("u", [4] * 36, 4, level=HIGH), harness.add("v", [3] * 4, 4, level=HIGH)]
    started = {row.request for row in harness.step().rows}
    assert harness.scheduler.preemptions == 2
    assert started.issuperset(urgent)
    assert started.isdisjoint([small, large])
    assert small in {row.request for row in harness.step().rows}
    harness.run()
    assert outputs(small) == expected([2] * 12, 60)
    assert outputs(large) == expected([1] * 100, 60)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_classes_change_no_tokens_and_leak_nothing(depth: int, seed: int):
    rng = random.Random(seed)
    harness = Harness(pages=30, seqs=5, budget=16, depth=depth)
    requests = []
    for i, prompt in enumerate(prompts(50, seed, longest=30)):
        requests.append(harness.add(f"r{i}", prompt, rng.randrange(1, 25), level=rng.randrange(3)))
        harness.time += rng.random() * 20
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.run()
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        assert outputs(request) == expected(prompt, request.params.max_tokens)
