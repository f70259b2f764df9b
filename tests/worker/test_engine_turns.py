"""Prompts in turn: by when each would be done alone, and within the time that decoding sequences bear."""

from __future__ import annotations

import random

import pytest

from tests.worker.scheduler_harness import Blind, Harness, expected, known_pace, outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_does_not_wait_for_a_long_one(depth: int):
    harness = Blind(pages=9000, seqs=8, budget=512, depth=depth, pace=known_pace(1e-3))
    long = harness.add("long", [i % 50 for i in range(30_000)], 2)
    for _ in range(3):
        harness.step()
    short = harness.add("short", [1] * 700, 2)
    steps = [{row.request.id: row.count for row in harness.step().rows} for _ in range(2)]
    assert [step["short"] for step in steps] == [512, 188]
    assert steps[1]["long"] == 512 - 188
    harness.run()
    assert (long.finish_reason, short.finish_reason) == ("length", "length")


def test_prompts_of_one_length_are_computed_one_after_the_other():
    harness = Blind(pages=9000, seqs=8, budget=512, pace=known_pace(1e-3))
    requests = [harness.add(f"r{i}", [i] * 2000, 1) for i in range(4)]
    order: list[str] = []
    while any(request.finish_reason is None for request in requests):
        order += [row.request.id for row in harness.step().rows if row.request.id not in order]
    assert order == [f"r{i}" for i in range(4)]
    assert max(len(step.rows) for step in harness.steps) <= 2


def test_a_long_prompt_is_done_under_a_flood_of_short_ones():
    """It may take twice its own time: as long again as others, which came until then, go before it."""
    harness = Blind(pages=9000, seqs=8, budget=512, pace=known_pace(1e-3))
    long = harness.add("long", [i % 50 for i in range(10_000)], 1)
    steps = 0
    while long.finish_reason is None:
        harness.add(f"short{steps}", [steps % 50] * 500, 1)  # nearly a whole step, in each
        harness.step()
        harness.time += 0.512
        steps += 1
        assert steps <= 50
    assert 20 <= steps <= 45


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_turns_change_no_tokens_and_leak_nothing(depth: int, seed: int):
    rng = random.Random(seed)
    harness = Harness(pages=40, seqs=5, budget=12, depth=depth, pace=known_pace(0.1))
    requests = []
    for i in range(40):
        prompt = [rng.randrange(50) for _ in range(rng.choice((3, 10, 60)))]
        requests.append(harness.add(f"r{i}", prompt, rng.randrange(1, 20), level=rng.randrange(3)))
        harness.time += rng.random()
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.run()
    assert harness.scheduler.preemptions > 0
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        assert outputs(request) == expected(prompt, request.params.max_tokens)


def test_a_bound_in_time_holds_prompts_back_only_beside_decoding_sequences():
    pace = known_pace(1e-3)
    pace.target, pace.decode, pace._largest = 0.02, 0.01, 512
    harness = Harness(pages=600, seqs=8, budget=64, pace=pace)
    harness.add("a", [1] * 100, 40)
    assert [harness.step().num_tokens for _ in range(2)] == [64, 36]
    harness.add("b", [2] * 45, 3)
    pieces = [[row.count for row in harness.step().rows] for _ in range(5)]
    assert pieces == [[1, 10]] * 4 + [[1, 5]]
    harness.run()


def test_whoever_is_late_is_named_once_and_nobody_who_has_begun():
    harness = Harness(seqs=1)
    scheduler = harness.scheduler
    begun = harness.add("begun", [1] * 5, 30, deadline=5.0)
    harness.step()
    waits = [harness.add(f"w{i}", [2], 2, deadline=limit) for i, limit in enumerate((3.0, 0.0, 9.0, 4.0))]
    assert scheduler.late(2.9) == []
    assert scheduler.late(4.0) == [waits[0], waits[3]]
    for request in (waits[0], waits[3]):
        scheduler.finish(request, "error")
    assert scheduler.late(8.0) == []
    assert scheduler.late(9.0) == [waits[2]]
    scheduler.finish(waits[2], "error")
    harness.run()
    assert [begun.finish_reason, waits[1].finish_reason] == ["length", "length"]


def test_a_step_that_a_short_prompt_ends_in_is_not_filled_up_with_a_long_one():
    pace = known_pace(1e-3)
    pace.target = None  # the time of a step counts
    harness = Blind(pages=9000, seqs=8, budget=512, pace=pace)
    harness.add("long", [i % 50 for i in range(5_000)], 1)
    assert [row.count for row in harness.step().rows] == [512], "nobody waits for it"
    for name in ("a", "b"):
        harness.add(name, [1] * 60, 1)
    pieces = {row.request.id: row.count for row in harness.step().rows}
    assert pieces == {"a": 60, "b": 60, "long": 120}
    harness.add("other", [2] * 700, 1)
    assert [row.count for row in harness.step().rows] == [512]
    assert {row.request.id: row.count for row in harness.step().rows} == {"other": 188, "long": 188}


def test_turns_hold_where_all_the_time_is_in_reading_earlier_tokens():
    """As it may look from the times of a few long steps."""
    pace = known_pace(0.0)
    pace.read = 1e-6
    harness = Blind(pages=9000, seqs=8, budget=512, pace=pace)
    harness.add("long", [i % 50 for i in range(5_000)], 1)
    harness.step()
    harness.add("short", [1] * 60, 1)
    assert "short" in {row.request.id for row in harness.step().rows}
