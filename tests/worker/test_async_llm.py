"""AsyncLLM: a real engine process with a small random model, many requests from one event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from tests.worker import faulty_engine
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, AsyncLLM, SamplingParams, async_llm
from worker.async_llm import EngineDead
from worker.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_memory_bytes": "8MiB", "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama", SMALL, write_byte_bpe(directory))
    return str(directory)


@asynccontextmanager
async def running(model: str) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(model, **OPTIONS) as llm:
        yield llm


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **fields: Any) -> RequestOutput:
    results = [result async for result in llm.generate(prompt, params, **fields)]
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    return results[-1]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.02)


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine has nothing left; `ping` brings fresh statistics."""
    async with asyncio.timeout(100):
        while True:
            await llm.reset_prefix_cache()
            if not (llm.stats.running or llm.stats.waiting or llm.stats.pages_used):
                return
            await asyncio.sleep(0.02)


async def test_answers_are_those_of_llm(model: str) -> None:
    prompts = ["The fleet", [5, 6, 7], {"prompt": "one worker"}, {"prompt_token_ids": [9, 10]}]
    params = [GREEDY, SamplingParams(n=3, seed=3, max_tokens=9), SamplingParams(seed=1, stop="e"), GREEDY]
    with LLM(model, **OPTIONS) as offline:
        expected = offline.generate(prompts, params)
        chat = offline.chat([{"role": "user", "content": "Hi"}], GREEDY)[0]
    async with running(model) as llm:
        found = await asyncio.gather(*map(last, [llm] * 4, prompts, params))
        assert [result.outputs for result in found] == [result.outputs for result in expected]
        assert [result.prompt for result in found] == ["The fleet", None, "one worker", None]
        results = [one async for one in llm.chat([{"role": "user", "content": "Hi"}], GREEDY)]
        assert (results[-1].prompt, results[-1].outputs) == (chat.prompt, chat.outputs)
        await idle(llm)


async def test_pieces_are_cumulative_or_new(model: str) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    async with running(model) as llm:
        grown = [result async for result in llm.generate("A", params)]
        pieces = [result async for result in llm.generate("A", params, delta=True)]
    for index in (0, 1):
        whole = grown[-1].outputs[index]
        assert len(whole.token_ids) == len(whole.logprobs or ()) == 40
        for before, after in pairwise(grown):
            assert after.outputs[index].text.startswith(before.outputs[index].text)
            assert len(after.outputs[index].token_ids) >= len(before.outputs[index].token_ids)
        parts = [result.outputs[index] for result in pieces]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == whole.logprobs
        assert parts[-1].finish_reason == whole.finish_reason == "length"


async def test_a_hundred_at_once(model: str) -> None:
    async with running(model) as llm:
        params = [SamplingParams(seed=i, max_tokens=5 + i % 7, ignore_eos=True) for i in range(100)]
        results = await asyncio.gather(*(last(llm, [1 + i], params[i]) for i in range(100)))
        assert [len(result.outputs[0].token_ids) for result in results] == [5 + i % 7 for i in range(100)]
        assert (await last(llm, [43], params[42])).outputs == results[42].outputs
        await idle(llm)


async def test_whoever_stops_listening_ends_the_request(model: str) -> None:
    async with running(model) as llm:

        async def listen() -> None:
            async for _ in llm.generate("A", ENDLESS):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(listen())
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(llm)
        async with aclosing(llm.generate("A", ENDLESS, "again")) as results:
            async for _ in results:
                break
        await idle(llm)
        assert (await last(llm, "A", request_id="again")).finished


async def test_abort_by_name(model: str) -> None:
    async with running(model) as llm:
        results = []
        async for result in llm.generate(
            "A", SamplingParams(n=2, max_tokens=30_000, ignore_eos=True), "mine"
        ):
            results.append(result)
            if len(results) == 1:
                with pytest.raises(ValueError, match="request id mine is in use"):
                    await last(llm, "B", request_id="mine")
                await llm.abort("nobody")
                await llm.abort("mine")
        assert [output.finish_reason for output in results[-1].outputs] == ["abort", "abort"]
        await idle(llm)


async def test_wrong_requests_are_refused_and_others_go_on(model: str) -> None:
    async with running(model) as llm:
        other = asyncio.create_task(last(llm, "A"))
        for prompt, message in (("", "empty"), ([1] * 40_000, "max_model_len"), ([100_000], "token ids")):
            with pytest.raises(ValueError, match=message):
                await last(llm, prompt)
        with pytest.raises(ValueError, match="has nothing"):
            llm.generate({})  # type: ignore[typeddict-item]
        assert (await other).finished


async def test_the_death_of_the_engine_is_told_to_everybody(model: str) -> None:
    async with running(model) as llm:
        tasks = [asyncio.create_task(last(llm, [5 + i], ENDLESS)) for i in range(3)]
        await eventually(lambda: llm.stats.running == 3)
        assert llm._client is not None
        assert llm._client.pid is not None
        os.kill(llm._client.pid, signal.SIGKILL)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDead)
            assert "signal 9" in str(error)
        with pytest.raises(EngineDead, match="signal 9"):
            await last(llm, "A")


async def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "engine_command", faulty_engine.command)
    poison = [5, faulty_engine.POISON, 6]
    async with running(model) as llm:
        expected = (await last(llm, "A")).outputs
        beside = asyncio.create_task(last(llm, [5], ENDLESS))
        await eventually(lambda: llm.stats.running)
        for task in (asyncio.create_task(last(llm, poison)), beside):
            with pytest.raises(RuntimeError, match="the engine failed in a step of this request: out of mem"):
                await task
        assert (await last(llm, "A")).outputs == expected
        assert llm._client is not None
        assert await llm._client.call("check_integrity") == ""
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine failed in a step"):
                await last(llm, poison)
        with pytest.raises(EngineDead, match="steps keep failing: out of memory: weights"):
            await last(llm, poison)  # the fourth within a minute


async def test_life(model: str) -> None:
    llm = AsyncLLM(model, **OPTIONS)
    with pytest.raises(RuntimeError, match="isn't running"):
        llm.generate("A")
    await llm.start()
    assert llm.info.max_num_seqs == 8
    assert llm.tokenizer is not None
    with pytest.raises(RuntimeError, match="was started before"):
        await llm.start()
    left = asyncio.create_task(last(llm, "A", ENDLESS))
    await eventually(lambda: llm.stats.running)
    await llm.close()
    assert (await left).outputs[0].finish_reason == "abort"
    with pytest.raises(RuntimeError, match="isn't running"):
        llm.generate("A")
    await llm.close()


async def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(ValueError, match="no such file or directory"):
        await AsyncLLM("/no/such/model").start()
    with pytest.raises(ValueError, match="max_num_seqs"):
        AsyncLLM("m", max_num_seqs=0)


async def test_an_engine_that_cannot_start_says_why(model: str) -> None:
    llm = AsyncLLM(model, threads=1, max_model_len=4096, num_gpu_blocks_override=3)
    with pytest.raises(EngineDead, match="max_model_len"):
        await llm.start()
