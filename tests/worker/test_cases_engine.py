"""Cases from the field for the engine, in this process: a small model, and pools as the case needs them."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch

from contracts.options import WorkerOptions
from tests.worker.overlapped import overlap_steps
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams
from worker.engine.blocks import PagePool, page_hashes, root_hash
from worker.engine.budget import plan_pages
from worker.engine.config import EngineError, resolve
from worker.ipc.messages import EngineRequest
from worker.llm import CompletionOutput
from worker.runner.batch import BatchState
from worker.weights.source import resolve_source

GIB = 1 << 30
SHARED = [*range(100, 180)]  # five pages of every prompt
PROMPTS = [[*SHARED, *range(last, last + 20)] for last in range(10, 34, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama", SMALL, write_byte_bpe(directory))
    return str(directory)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, kv_cache_memory_bytes="32MiB", threads=1) as llm:
        yield llm


def assert_same(found: CompletionOutput, expected: CompletionOutput) -> None:
    """The same tokens with the same log-probabilities, one for every token."""
    assert found.token_ids == expected.token_ids
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert [entry.token_id for entry in found.logprobs] == found.token_ids
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert len(ours.top) == len(theirs.top) == 5


@pytest.mark.parametrize(
    "penalties",
    [{}, {"repetition_penalty": 1.8, "presence_penalty": 2.0, "frequency_penalty": 2.0}],
    ids=["plain", "penalties"],
)
@pytest.mark.parametrize("overlapped", [False, True], ids=["one step", "two steps in flight"])
def test_preemption_over_a_shared_prefix_changes_nothing(
    llm: LLM, model: str, overlapped: bool, penalties: dict[str, float]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=5, **penalties)
    llm.reset_prefix_cache()
    plenty = llm.generate(PROMPTS, params)
    with LLM(model, num_gpu_blocks_override=22, threads=1) as few:
        if overlapped:
            overlap_steps(few)
        scarce = few.generate(PROMPTS, params)
        assert few.stats.preemptions > 0
        assert few.check_integrity() == ""
    for found, expected in zip(scarce, plenty):
        assert_same(found.outputs[0], expected.outputs[0])
        # Told once, as of the first start: what a restart finds in the cache is its own doing.
        assert found.cached_tokens % 16 == 0
        assert found.cached_tokens < len(found.prompt_token_ids)
    assert scarce[0].cached_tokens == 0
    if penalties:
        assert len(set(plenty[0].outputs[0].token_ids)) > 50, "the penalties are too weak to show"


def test_log_probabilities_are_complete_on_a_cache_hit(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=5)
    llm.reset_prefix_cache()
    (first,), (again,) = llm.generate(PROMPTS[0], params), llm.generate(PROMPTS[0], params)
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)
    assert_same(again.outputs[0], first.outputs[0])


@pytest.mark.parametrize(
    "narrow",
    [{"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1.0001e-5}],
    ids=str,
)
def test_the_narrowest_sampling_is_greedy(llm: LLM, narrow: dict[str, float]) -> None:
    """Also after a penalty that takes the logits as far apart as any may."""
    common = {"max_tokens": 20, "ignore_eos": True, "repetition_penalty": 0.01}
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, **common))
    found = llm.generate(PROMPTS, SamplingParams(**{"temperature": 1.0, "seed": 1, **common, **narrow}))
    tokens = [[result.outputs[0].token_ids for result in results] for results in (found, greedy)]
    assert tokens[0] == tokens[1]


def test_a_prompt_that_the_pool_could_never_hold_is_refused_not_kept_waiting(model: str) -> None:
    with LLM(model, num_gpu_blocks_override=5, threads=1) as small:
        assert small.info.max_model_len == 4 * 16
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        with pytest.raises(ValueError, match="64 tokens; max_model_len is 64"):
            small.generate([5] * 64, params)
        full = small.generate([5] * 40, params)[0].outputs[0]
        assert (len(full.token_ids), full.finish_reason) == (24, "length")
        assert small.check_integrity() == ""


def test_pages_whose_tokens_collide_under_a_guessable_hash_are_told_apart() -> None:
    """Python's own hash takes numbers modulo 2**61 - 1, and -1 for -2."""
    modulus = 2**61 - 1
    pairs = [([1, 2], [1 + modulus, 2]), ([-1, 2], [-2, 2])]
    for left, right in pairs:
        assert hash(tuple(left)) == hash(tuple(right))
        pool = PagePool(8, 2)
        (page,) = pool.allocate(1) or []
        pool.publish(page, page_hashes(root_hash(), left, 2)[0])
        assert pool.find([page_hashes(root_hash(), left, 2)[0]]) == [page]
        assert pool.find([page_hashes(root_hash(), right, 2)[0]]) == []


@pytest.mark.parametrize(("salt", "adapter"), [("x", ""), ("", "x"), ("xx", "x"), ("x", "xx")])
def test_a_salt_never_meets_an_adapter_of_its_name(salt: str, adapter: str) -> None:
    pool = PagePool(8, 2)
    (page,) = pool.allocate(1) or []
    pool.publish(page, page_hashes(root_hash(salt, adapter), [1, 2], 2)[0])
    assert pool.find([page_hashes(root_hash(adapter, salt), [1, 2], 2)[0]]) == []


def test_a_storm_of_aborts_touches_no_page_of_others_and_leaks_none(model: str) -> None:
    """Bit for bit; and what is finished after it is what it would have been without it."""
    rng = random.Random(5)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "threads": 1}
    with LLM(model, num_gpu_blocks_override=80, **limits) as llm:
        expected = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
        engine = llm._engine
        cache, pool = engine.runner.kv_cache.pool, engine.scheduler.pool
        canaries = pool.allocate(50) or []  # leaves less than eight requests need: some are preempted
        with torch.inference_mode():
            cache[:, :, canaries] = 1.25
        alive: set[str] = set()
        for number in range(80):
            prompt = [*SHARED[: rng.randrange(80)], *rng.choices(range(300), k=rng.randrange(1, 60))]
            assert engine.add(EngineRequest(str(number), prompt, params, number)) is None
            alive.add(str(number))
            for _ in range(rng.randrange(4)):
                alive -= {output.request_id for output in engine.step() if output.finish_reason}
            for name in rng.sample(sorted(alive), len(alive) // 8):
                engine.abort(name)
                alive.remove(name)
        while engine.has_work:
            engine.step()
        assert llm.stats.preemptions > 0
        assert bool((cache[:, :, canaries] == 1.25).all())
        pool.release(canaries)
        assert llm.check_integrity() == ""
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == expected


def test_slots_of_very_high_pages_are_64_bit() -> None:
    state = BatchState(2, 256, 16, torch.device("cpu"))
    state.tables[1, :2] = torch.tensor([3, 2**28 + 5], dtype=torch.int32)
    slots = state.slots(torch.tensor([1, 1, 1]), torch.tensor([2, 16, 31]))
    assert slots.tolist() == [3 * 16 + 2, 2**32 + 5 * 16, 2**32 + 5 * 16 + 15]


def test_workers_that_start_together_get_what_each_gets_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks what is free, which the other one's start changes."""

    def asked(*args: object, **kwargs: object) -> object:
        raise AssertionError("the start depends on what is free now")

    for module, name in ((torch.cuda, "mem_get_info"), (psutil, "virtual_memory"), (os, "sysconf")):
        monkeypatch.setattr(module, name, asked)

    def load() -> None:
        with LLM(model, max_num_seqs=4, threads=1) as llm:
            pages.append(llm.info.num_pages)

    pages: list[int] = []
    load()
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pages) == 3
    assert len(set(pages)) == 1


def test_the_pages_of_a_card_are_what_its_budget_leaves(model: str) -> None:
    """2 layers x 2 x 16 tokens x 32 x 4 bytes: 8 KiB a page; nothing is asked of the device."""
    config = resolve(resolve_source(model), WorkerOptions(device="cpu", max_model_len=32768))
    on_card = dataclasses.replace(config, gpu_memory_bytes=4 * GIB)
    budget = plan_pages(on_card, weight_bytes=3 * GIB, activation_bytes=GIB // 2)
    assert (budget.num_pages, budget.max_model_len) == (GIB // 2 // 8192, 32768)
    with pytest.raises(EngineError, match=r"budget 4\.0 GiB - weights 3\.9"):
        plan_pages(on_card, weight_bytes=4 * GIB - (100 << 20), activation_bytes=90 << 20)


def test_an_offline_chat_goes_through_the_template(llm: LLM) -> None:
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    (chat,) = llm.chat([{"role": "user", "content": "hello"}], params)
    assert chat.prompt_token_ids == llm.tokenizer.encode(rendered)
    assert chat.outputs == llm.generate(chat.prompt_token_ids, params)[0].outputs
