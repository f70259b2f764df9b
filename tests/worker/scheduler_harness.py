"""A scheduler driven by a stand-in for the model, whose next token depends on all before it."""

from __future__ import annotations

import hashlib
import random
from collections import deque

from worker.engine.blocks import PagePool
from worker.engine.pace import Pace
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.ipc.messages import NORMAL, EngineRequest
from worker.params import SamplingParams
from worker.request import Request, Step

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
        self.last_of_row: dict[int, tuple[str, int]] = {}  # whose token was sampled there, and its place
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
        sibling: bool = False,
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
            sibling=sibling,
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
            end = row.start + row.count
            if end > len(request.tokens):  # its last token is taken from where the device keeps it
                assert self.last_of_row[request.row] == (request.id, end), "the token of another sequence"
            for position in range(row.start, row.start + row.count):
                slot = request.pages[position // PAGE] * PAGE + position % PAGE
                self.slots[slot] = tuple(tokens[: position + 1])
            for position in range(row.start + row.count):  # what attention reads
                slot = request.pages[position // PAGE] * PAGE + position % PAGE
                assert self.slots[slot] == tuple(tokens[: position + 1]), "attention reads a foreign page"
            if row.sample:
                tokens.append(next_token(tokens[: row.start + row.count]))
                sampled.append(tokens[-1])
                self.last_of_row[request.row] = (request.id, len(tokens))
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


class Blind(Harness):
    """Without the model of the KV cache, which takes the square of a prompt's length."""

    def _compute(self, step: Step) -> list[int]:
        return [row.start % 50 for row in step.rows if row.sample]


def known_pace(token: float) -> Pace:
    """A pace that knows what a prompt's token takes, and sets no bound."""
    pace = Pace()
    pace.token = token
    return pace
