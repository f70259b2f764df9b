"""Prefixes that requests share: computed once, held by page, never across salts."""

from __future__ import annotations

import pytest

from tests.worker.scheduler_harness import PAGE, Harness, expected, outputs


def test_a_prefix_hit_is_capped_below_the_whole_prompt():
    harness = Harness()
    prompt = list(range(4 * PAGE))
    first = harness.add("a", prompt, 3)
    harness.run()
    second = harness.add("b", prompt, 3)
    harness.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * PAGE)
    assert outputs(first) == outputs(second)


def test_salted_requests_share_nothing_with_others():
    harness = Harness()
    prompt = list(range(4 * PAGE))
    harness.add("a", prompt, 3)
    harness.run()
    other = harness.add("b", prompt, 3, salt="tenant")
    harness.run()
    same = harness.add("c", prompt, 3, salt="tenant")
    harness.run()
    assert (other.cached_tokens, same.cached_tokens) == (0, 3 * PAGE)


def test_running_requests_share_prefix_pages():
    harness = Harness(budget=64)
    prompt = list(range(4 * PAGE))
    a = harness.add("a", prompt, 30)
    harness.step()
    b = harness.add("b", prompt, 30)
    harness.step()
    assert a.pages[:3] == b.pages[:3]
    assert a.pages[3] != b.pages[3]
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_shared_prefix_and_preemption_together(depth: int):
    shared = list(range(5 * PAGE))
    harness = Harness(pages=20, seqs=6, budget=16, depth=depth)
    requests = [harness.add(f"r{i}", [*shared, i], 24) for i in range(8)]
    harness.run()
    assert harness.scheduler.preemptions > 0
    for i, request in enumerate(requests):
        assert outputs(request) == expected([*shared, i], 24)


def test_what_was_cached_is_told_as_of_the_first_start():
    """Prompts that have nothing in common: what one of them finds after its preemption is its own."""
    harness = Harness(pages=20, seqs=6, budget=64)
    requests = [harness.add(f"r{i}", [i] * (3 * PAGE), 24) for i in range(6)]
    found = 0
    while harness.scheduler.waiting or harness.scheduler.running:
        prompts_again = [row for row in harness.step().rows if not row.decode and outputs(row.request)]
        found += sum(row.start for row in prompts_again)
    assert found > 0, "nobody found pages of his own again"
    assert [request.cached_tokens for request in requests] == [0] * 6
    assert harness.scheduler.prefix_queries == sum(request.prompt_length for request in requests)
    assert harness.scheduler.prefix_hits == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_prefixes_that_arrive_together_are_computed_once(depth: int):
    harness = Harness(pages=400, budget=400, depth=depth)
    prefix = [i % 50 for i in range(320)]
    requests = [harness.add(f"r{i}", [*prefix, 40 + i, i], 3) for i in range(6)]
    other = harness.add("other", [7] * 30, 3)
    assert {row.request.id for row in harness.step().rows} == {"r0", "other"}
    harness.run()
    for request in requests:
        assert outputs(request) == expected(request.tokens[:322], 3)
    assert sum(request.cached_tokens for request in requests) == 5 * 320
    assert outputs(other) == expected([7] * 30, 3)


def test_a_request_held_back_starts_when_the_one_it_waits_for_goes():
    harness = Harness(pages=400, budget=100)
    prefix = [i % 50 for i in range(320)]
    first, second = harness.add("a", [*prefix, 1], 3), harness.add("b", [*prefix, 2], 3)
    harness.step()
    assert second.row < 0
    harness.scheduler.finish(first, "abort")
    harness.run()
    assert outputs(second) == expected([*prefix, 2], 3)


def test_a_short_common_prefix_is_not_waited_for():
    harness = Harness(pages=400, budget=400)
    requests = [harness.add(f"r{i}", [*range(40), i], 3) for i in range(3)]
    assert len(harness.step().rows) == len(requests)
