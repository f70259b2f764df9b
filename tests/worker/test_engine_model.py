"""The whole engine with the real model: its greedy tokens are transformers', however they come about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from worker import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]  # seconds of arithmetic; more on a busy machine
# On a busy machine two threads spin while they wait for each other. How prompts are cut must not depend on
# how busy it is either: that moves logits by 1e-5, and with them a draw that is as near as that to another.
ONE_THREAD: dict[str, Any] = {"threads": 1, "tpot_target_ms": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
BRIEF = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(reference_tokens: Path) -> list[dict[str, Any]]:
    return json.loads(reference_tokens.read_text())["prompts"]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), kv_cache_memory_bytes="512MiB", **ONE_THREAD) as llm:
        yield llm


def check(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> None:
    results = llm.generate([p["prompt_ids"] for p in prompts], params)
    for result, prompt in zip(results, prompts):
        assert result.outputs[0].token_ids == prompt["greedy_ids"][: params.max_tokens], prompt["name"]
        assert result.outputs[0].finish_reason == "length"
    assert llm.check_integrity() == ""


def test_each_prompt_alone(llm: LLM, prompts: list[dict[str, Any]]):
    llm.reset_prefix_cache()
    for prompt in prompts:
        check(llm, [prompt], BRIEF)


def test_all_in_one_batch(llm: LLM, prompts: list[dict[str, Any]]):
    llm.reset_prefix_cache()
    check(llm, prompts)


def test_on_a_prefix_hit(llm: LLM, prompts: list[dict[str, Any]]):
    check(llm, prompts, BRIEF)
    result = llm.generate(prompts[0]["prompt_ids"], BRIEF)[0]
    full = (len(prompts[0]["prompt_ids"]) - 1) // llm.info.page_size * llm.info.page_size
    assert result.cached_tokens == full > 0
    check(llm, prompts, BRIEF)


def test_with_chunks_of_16_tokens(demo_model: Path, prompts: list[dict[str, Any]]):
    with LLM(
        str(demo_model),
        max_num_batched_tokens=16,
        max_num_seqs=8,
        kv_cache_memory_bytes="256MiB",
        **ONE_THREAD,
    ) as llm:
        check(llm, prompts, BRIEF)


def test_with_preemption_and_a_pool_full_of_nan(demo_model: Path, prompts: list[dict[str, Any]]):
    longest = max(len(p["prompt_ids"]) for p in prompts) + BRIEF.max_tokens
    pages = 1 + 2 * -(-longest // 16)
    with LLM(str(demo_model), num_gpu_blocks_override=pages, **ONE_THREAD) as llm:
        with torch.inference_mode():
            llm._engine.runner.kv_cache.pool.fill_(torch.nan)
        check(llm, prompts, BRIEF)
        assert llm.stats.preemptions > 0


def test_penalties_logprobs_and_seeds_survive_preemption(
    llm: LLM, demo_model: Path, prompts: list[dict[str, Any]]
):
    longest = max(len(p["prompt_ids"]) for p in prompts) + 32
    pages = 1 + 2 * -(-longest // 16)
    params = [
        SamplingParams(
            temperature=0.9,
            seed=100 + i,
            max_tokens=32,
            ignore_eos=True,
            logprobs=2,
            top_p=0.95,
            presence_penalty=1.5,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
        )
        for i in range(len(prompts))
    ]
    llm.reset_prefix_cache()
    before = llm.stats.preemptions
    undisturbed = llm.generate([p["prompt_ids"] for p in prompts], params)
    assert llm.stats.preemptions == before
    with LLM(str(demo_model), num_gpu_blocks_override=pages, **ONE_THREAD) as short_of_pages:
        preempted = short_of_pages.generate([p["prompt_ids"] for p in prompts], params)
        assert short_of_pages.stats.preemptions > 0
    for plenty, scarce in zip(undisturbed, preempted, strict=True):
        assert plenty.outputs[0].token_ids == scarce.outputs[0].token_ids
        for a, b in zip(plenty.outputs[0].logprobs or [], scarce.outputs[0].logprobs or [], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_pages_that_no_sequence_holds_stay_as_they_are(llm: LLM, prompts: list[dict[str, Any]]):
    """Bit for bit, whatever the batch looks like."""
    llm.reset_prefix_cache()
    cache, pages = llm._engine.runner.kv_cache.pool, llm._engine.scheduler.pool
    kept = pages.allocate(pages.capacity // 2) or []
    try:
        with torch.inference_mode():
            cache[:, :, kept] = 1.25
        results = llm.generate([p["prompt_ids"] for p in prompts[:5]], BRIEF)
        expected = [p["greedy_ids"][: BRIEF.max_tokens] for p in prompts[:5]]
        assert [r.outputs[0].token_ids for r in results] == expected
        assert bool((cache[:, :, kept] == 1.25).all())
    finally:
        pages.release(kept)
    assert llm.check_integrity() == ""


def test_chat_says_something_sensible(llm: LLM):
    result = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=24),
    )[0]
    assert "Paris" in result.outputs[0].text
    assert result.outputs[0].finish_reason in ("stop", "length")


def test_n_stop_and_logprobs(llm: LLM):
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12, logprobs=1, stop=("\n",))
    result = llm.generate("Once upon a time", params)[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for output in result.outputs:
        assert "\n" not in output.text
        assert len(output.logprobs or []) == len(output.token_ids)
    assert llm.generate("Once upon a time", params)[0].outputs == result.outputs


def test_hundreds_of_prompts_in_one_call(llm: LLM):
    results = llm.generate(
        [f"{i} plus one is" for i in range(300)], SamplingParams(temperature=0, max_tokens=2)
    )
    assert len(results) == 300
    assert all(len(result.outputs[0].token_ids) == 2 for result in results)
    assert llm.check_integrity() == ""


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1] * 9000, "max_model_len"),
        ([49152], "token ids of a prompt must be from 0"),
        ([-1], "token ids"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing_behind(llm: LLM, prompt: Any, message: str):
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt, "fine"], GREEDY)
    assert llm.stats.running == llm.stats.waiting == 0
    assert llm.check_integrity() == ""


def test_a_pool_too_small_for_the_length_asked_for_says_the_sum(demo_model: Path):
    from worker.engine.config import EngineError

    with pytest.raises(EngineError, match=r"kv_cache_memory_bytes 10.0 MiB.*max_model_len is 4096"):
        LLM(str(demo_model), max_model_len=4096, kv_cache_memory_bytes="10MiB")
