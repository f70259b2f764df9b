"""GET /internal/window: one count a request, of its first token and of the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec

from contracts.times import Times, bucket_of, seconds_of
from tests.worker.fake_engine import MODEL, FakeEngine, eventually, in_process, make_state, say, serving
from worker.server.metrics import SequenceTimer
from worker.server.state import ServerState
from worker.server.times import TimesBook


async def window(client: httpx.AsyncClient) -> Times:
    answer = await client.get("/internal/window")
    assert answer.status_code == 200
    return msgspec.json.decode(answer.content, type=Times)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", **fields}


async def test_a_request_counts_once_in_each() -> None:
    state = make_state(FakeEngine(script=say("some answer")))
    async with in_process(state) as client:
        assert (await client.get("/internal/window")).json() == {"ttft": {}, "tpot": {}}
        for path, fields in (
            ("/v1/completions", {}),
            ("/v1/completions", {"stream": True}),
            ("/v1/completions", {"n": 3}),
            ("/v1/completions", {"prompt": ["one", "another"]}),
            ("/generate", {}),
            ("/generate_stream", {}),
        ):
            assert (await client.post(path, json=completion(**fields))).status_code == 200
        messages = [{"role": "user", "content": "hello"}]
        await client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        found = await window(client)
        assert (sum(found.ttft.values()), sum(found.tpot.values())) == (7, 7)
        await client.post("/v1/completions", json=completion(max_tokens=1))  # it has no further token
        await client.post("/v1/completions", json=completion(max_tokens=-1))
        await client.post("/tokenize", json={"model": MODEL, "prompt": "x"})
        found = await window(client)
        assert (sum(found.ttft.values()), sum(found.tpot.values())) == (8, 7)


async def test_the_times_are_those_that_a_client_sees() -> None:
    engine = FakeEngine(script=say("0123456789"), step_seconds=0.02)
    async with in_process(make_state(engine)) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await client.post("/v1/completions", json=completion())
        took = loop.time() - began
        found = await window(client)
    (ttft,), (tpot,) = found.ttft, found.tpot
    assert 0.02 * 0.95 <= seconds_of(ttft) <= took
    assert seconds_of(tpot) >= 0.02 * 0.95
    assert seconds_of(ttft) + 10 * seconds_of(tpot) <= took * 1.05


async def test_who_leaves_is_counted_as_far_as_he_got() -> None:
    engine = FakeEngine(script=say("a" * 400), paused=True)
    state = make_state(engine)
    async with serving(state) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:

        async def ask_for(steps: int) -> None:
            body = completion(max_tokens=400, stream=True)
            async with client.stream("POST", "/v1/completions", json=body):
                (generation,) = state.generations
                for number in range(steps):
                    engine.step()
                    await eventually(lambda n=number: generation.usage().completion_tokens > n)  # type: ignore[misc]
            await eventually(lambda: not state.generations)

        expected = [(0, 0), (1, 0), (2, 1)]
        for steps, counts in enumerate(expected):
            await ask_for(steps)
            found = await window(client)
            assert (sum(found.ttft.values()), sum(found.tpot.values())) == counts
        assert json.loads((await client.get("/health")).content)["inflight"] == 0


def test_several_answers_share_their_mean() -> None:
    state = ServerState(make_state().config)
    book = TimesBook()

    def answer(first: float, last: float, count: int) -> SequenceTimer:
        timer = state.metrics.sequence(0.0)
        timer.first, timer.last, timer.count = first, last, count
        return timer

    book.end([answer(1, 2, 11), answer(1, 5, 11), answer(1, 1, 1), answer(0, 0, 0)])
    assert book.times().tpot == {bucket_of(0.25): 1}
    book.end([answer(1, 1, 1)])
    book.end([])
    assert book.times() == Times(tpot={bucket_of(0.25): 1})


async def test_it_is_for_this_machine_only() -> None:
    async with in_process(make_state(), ("10.0.0.9", 999)) as client:
        assert (await client.get("/internal/window")).status_code == 404
