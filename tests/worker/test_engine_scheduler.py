"""The scheduler, with a stand-in for the model: the next token is a function of all tokens before it."""

from __future__ import annotations

import hashlib
import random
from collections import deque

import pytest

from worker.engine.blocks import PagePool
from worker.engine.classes import MOST_RECLAIMED
from worker.engine.pace import Pace
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.ipc.messages import NORMAL, EngineRequest
from worker.params import SamplingParams
from worker.request import AGEING, CLASS_AGEING, Request, Step

PAGE = 4


def next_token(tokens: list[int]) -> int:
    return hashlib.sha256(repr(tokens).encode()).digest()[0] % 50


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Harness:
    """Runs steps as the engine does, `depth` of them in flight, and checks on a model of the KV cache that
    every token attends to the right content: each slot remembers which prefix it was computed for."""

    def __init__(
        self,
        pages: int = 64,
        seqs: int = 8,
        budget: int = 32,
        depth: int = 1,
        chunked: bool = True,
        pace: Pace | None = None,
    ):
        self.pool = PagePool(pages, PAGE)
        self.scheduler = Scheduler(SchedulerConfig(seqs, budget, chunked), self.pool, pace)
        self.budget, self.depth, self.chunked = budget, depth, chunked
        self.launched: deque[tuple[Step, list[int]]] = deque()
        self.device_tokens: dict[str, list[int]] = {}  # what the device knows, unread tokens included
        self.slots: dict[int, tuple[int, ...]] = {}
        self.numbers = 0
        self.time = 0.0
        self.steps: list[Step] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        count: int,
        priority: int = 0,
        salt: str = "",
        level: int = NORMAL,
        deadline: float = 0.0,
        **params,
    ) -> Request:
        self.numbers += 1
        self.time += 0.001
        message = EngineRequest(
            name,
            prompt,
            SamplingParams(max_tokens=count, **params),
            0,
            salt,
            priority,
            arrival=self.time,
            service_class=level,
            deadline=deadline,
        )
        request = Request(message, max_model_len=40_000, eos_token_ids=frozenset({99}), number=self.numbers)
        self.device_tokens[name] = list(prompt)
        self.scheduler.add(request)
        return request

    def step(self) -> Step:
        self.time += 0.001
        step = self.scheduler.schedule(self.time)
        self.steps.append(step)
        if step.rows:
            assert self.chunked is False or step.num_tokens <= self.budget
            self.launched.append((step, self._compute(step)))
        if self.launched and (len(self.launched) >= self.depth or not step.rows):
            self._collect(*self.launched.popleft())
        return step

    def _compute(self, step: Step) -> list[int]:
        sampled = []
        for row in step.rows:
            request = row.request
            tokens = self.device_tokens[request.id]
            for position in range(row.start, row.start + row.count):
                slot = request.pages[position // PAGE] * PAGE + position % PAGE
                self.slots[slot] = tuple(tokens[: position + 1])
            for position in range(row.start + row.count):  # what attention reads
                slot = request.pages[position // PAGE] * PAGE + position % PAGE
                assert self.slots[slot] == tuple(tokens[: position + 1]), "attention reads a foreign page"
            if row.sample:
                tokens.append(next_token(tokens[: row.start + row.count]))
                sampled.append(tokens[-1])
        return sampled

    def _collect(self, step: Step, sampled: list[int]) -> None:
        values = iter(sampled)
        for row in step.rows:
            self.scheduler.collected(row.request)
            if not row.sample:
                if row.request.finish_reason is None:
                    self.scheduler.prefilled(row.request)
                continue
            token = next(values)
            if row.request.finish_reason is None:
                self.scheduler.update(row.request, token)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running or self.launched):
                break
            self.step()
        else:
            raise AssertionError("the scheduler doesn't finish")
        self.scheduler.check()
        assert self.pool.num_free == self.pool.capacity


def outputs(request: Request) -> list[int]:
    return request.tokens[request.prompt_length :]


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(50) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


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


class Blind(Harness):
    """Without the model of the KV cache, which takes the square of a prompt's length."""

    def _compute(self, step: Step) -> list[int]:
        return [row.start % 50 for row in step.rows if row.sample]


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


def known_pace(token: float) -> Pace:
    """A pace that knows what a prompt's token takes, and sets no bound."""
    pace = Pace()
    pace.token = token
    return pace


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
