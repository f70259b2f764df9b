"""The pace against machines that are made up: what it learns of them, and what it then allows."""

from __future__ import annotations

import math
import random

import pytest

from tests.worker.scheduler_harness import Blind
from worker.engine.pace import FIRST, LEAST, STRETCH, Pace
from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams
from worker.request import Request, Row, Step


def row(start: int, count: int, decode: bool = False) -> Row:
    message = EngineRequest("r", [1], SamplingParams(), 0)
    request = Request(message, max_model_len=1, eos_token_ids=frozenset(), number=0)
    return Row(request, start, count, sample=decode, decode=decode)


def step(decodes: int, *pieces: tuple[int, int]) -> Step:
    return Step([row(100, 1, decode=True)] * decodes + [row(start, count) for start, count in pieces])


class Machine:
    """Steps take `decode` seconds, and more for prompts, whose attention is computed `tile` tokens at a time;
    `noise`: a share by which they differ."""

    def __init__(
        self, decode: float, token: float, read: float, flat: int = 0, noise: float = 0.0, tile: int = 1
    ):
        self.decode, self.token, self.read, self.flat, self.tile = decode, token, read, flat, tile
        self.noise = noise
        self.random = random.Random(0)

    def time(self, step: Step) -> float:
        pieces = [(r.start, r.count) for r in step.rows if not r.decode]
        tokens = max(0, sum(count for _, count in pieces) - self.flat)  # a few are free on a GPU
        reads = sum(math.ceil(count / self.tile) * self.tile * (start + count / 2) for start, count in pieces)
        seconds = self.decode + tokens * self.token + reads * self.read
        return seconds * (1 + self.random.uniform(-self.noise, self.noise))


def prefill(pace: Pace, machine: Machine, length: int, budget: int, start: int = 0) -> list[float]:
    """The times of the steps in which a prompt is computed beside 8 sequences that decode."""
    times: list[float] = []
    while start < length:
        count = pace.share(budget, 1, decoding=True).take(start, length - start)
        made = step(8, *([(start, count)] if count else []))
        seconds = machine.time(made)
        pace.observe(made, seconds)
        times += [seconds] if count else []
        start += count
    return times


def warmed(pace: Pace, machine: Machine) -> Pace:
    """After a short prompt and some decode steps."""
    for made in [step(0, (0, 12)), *[step(8)] * 20]:
        pace.observe(made, machine.time(made))
    return pace


CPU = {"decode": 0.03, "token": 2.7e-3, "read": 0.5e-6}
GPU = {"decode": 4e-3, "token": 25e-6, "read": 1e-9, "flat": 100}


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("kind", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("expected", [1e-5, 1e-3])
def test_a_long_prompt_keeps_steps_in_proportion(kind: dict[str, float], noise: float, expected: float):
    machine = Machine(**kind, noise=noise)
    pace = warmed(Pace(None, expected), machine)
    times = prefill(pace, machine, 30_000, budget=8192)
    assert max(times) <= 3.0 * machine.decode * (1 + noise)
    settled = times[10:]
    assert sum(settled) / len(settled) >= 0.7 * (1 + STRETCH) * machine.decode, "slower than it need be"


@pytest.mark.parametrize("target", [0.0, 4.5e-3, 10e-3])
def test_pieces_never_become_so_small_that_most_of_their_time_is_for_nothing(target: float):
    """At the end of a long prompt a tile takes longer than the target leaves: a piece of one token would be
    no faster, and the next one would look as expensive."""
    machine = Machine(decode=4e-3, token=12e-6, read=1.3e-9, tile=64)
    pace = warmed(Pace(target, 1e-5, least=64), machine)
    times = prefill(pace, machine, 30_000, budget=8192)
    assert len(times) <= math.ceil(30_000 / 64)
    assert max(times) <= max(1.2 * target, 2 * machine.decode)


@pytest.mark.parametrize("target", [0.05, 0.1, 0.4])
def test_a_target_is_met(target: float):
    machine = Machine(**CPU, noise=0.1)
    pace = warmed(Pace(target, 1e-4), machine)
    settled = sorted(prefill(pace, machine, 20_000, budget=8192)[10:])
    assert settled[len(settled) // 2] == pytest.approx(target, rel=0.15)


def test_a_target_that_no_step_can_meet_still_lets_prompts_go_on():
    machine = Machine(**CPU)
    pace = warmed(Pace(0.001), machine)
    settled = prefill(pace, machine, 10_000, budget=512)[20:]
    assert sum(settled) / len(settled) == pytest.approx((1 + LEAST) * machine.decode, rel=0.2)
    assert prefill(warmed(Pace(0.001), slow := Machine(0.03, 0.5, 0.0)), slow, 10, budget=512)


def test_the_first_to_ask_gets_a_token_and_nobody_more_than_there_is():
    pace = warmed(Pace(None), Machine(decode=0.03, token=10.0, read=0.0))
    share = pace.share(512, 1, decoding=True)
    assert [share.take(0, 10), share.take(0, 10), share.take(0, 1)] == [1, 0, 0]
    share = Pace().share(10, 1, decoding=True)
    assert [share.take(0, 7), share.take(0, 7), share.take(0, 7)] == [7, 3, 0]
    share.give_back(2)
    assert share.take(0, 7) == 2


def test_what_a_token_costs_is_told_from_what_it_reads():
    machine = Machine(decode=0.03, token=1e-3, read=2e-6)
    pace = warmed(Pace(None), machine)
    for start in range(0, 20_000, 200):
        pace.observe(made := step(8, (start, 64)), machine.time(made))
    assert pace.token == pytest.approx(1e-3, rel=0.25)
    assert pace.read == pytest.approx(2e-6, rel=0.1)
    assert pace.tokens_in(pace.seconds(700, 300), 700, 8192) in (299, 300)


def test_nobody_is_held_up_where_nobody_decodes_or_no_bound_is_set():
    pace = warmed(Pace(None), Machine(**CPU))
    assert pace.share(512, 1, decoding=False).take(0, 30_000) == 512
    free = warmed(Pace(math.inf), Machine(**CPU))
    assert free.share(512, 1, decoding=True).take(0, 30_000) == 512
    assert Pace(None).share(512, 1, decoding=True).take(0, 30_000) == 512, "nothing is known yet"


def test_a_burst_of_prompts_has_more_of_the_step_than_one():
    machine = Machine(**CPU)
    pace = warmed(Pace(None), machine)
    prefill(pace, machine, 5_000, budget=512)
    one, ten, hundred = (pace._bounded(512, n).take(0, 30_000) for n in (1, 10, 100))
    assert one < 30 < ten < hundred == 512


def test_steps_grow_carefully_into_what_was_never_timed():
    pace = Pace(None)
    for _ in range(5):
        pace.observe(step(8), 0.03)
    assert pace.share(8192, 1, decoding=True).take(0, 30_000) == FIRST
    pace.observe(step(8, (0, FIRST)), 0.0301)  # as if the tokens were free
    assert pace.share(8192, 1, decoding=True).take(0, 30_000) == 2 * FIRST


def test_decoding_that_takes_longer_meanwhile_is_noticed():
    """Else what it takes more would be put down to the prompt, of which ever less were computed."""
    machine = Machine(**CPU)
    pace = warmed(Pace(None), machine)
    prefill(pace, machine, 2_000, budget=512)
    machine.decode *= 2.5
    settled = prefill(pace, machine, 6_000, budget=512)[60:]
    assert sum(settled) / len(settled) == pytest.approx((1 + STRETCH) * machine.decode, rel=0.2)


def test_one_step_that_the_machine_held_up_changes_little():
    machine = Machine(**CPU)
    pace = warmed(Pace(None), machine)
    before = pace.decode
    pace.observe(step(8), 10.0)
    assert pace.decode <= 1.3 * before


@pytest.mark.parametrize("answers", [1, 128])
def test_many_answers_to_a_prompt_hold_others_up_as_one_does(answers: int) -> None:
    machine = Machine(**CPU)
    pace = warmed(Pace(None, 1e-3), machine)
    harness = Blind(pages=4000, seqs=64, budget=512, pace=pace)
    harness.add("stream", [1] * 8, 400)
    while not any(row.decode for row in harness.step().rows):
        pass
    long = [harness.add(f"long{i}", [i % 50 for i in range(3000)], 2, sibling=i > 0) for i in range(answers)]
    times = []
    while long[0].finish_reason is None:
        made = harness.step()
        seconds = machine.time(made)
        pace.observe(made, seconds)
        times.append(seconds)
    assert max(times) <= 3 * machine.decode
    harness.run()
    assert all(request.finish_reason == "length" for request in long)
