"""prompt_logprobs against transformers: in chunks, after preemptions, beside cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.overlapped import overlap_steps
from tests.worker.random_models import SMALL, Oracle, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams
from worker.ipc.messages import TokenLogprob
from worker.runner import prompt_logprobs as scoring

PADDING = 3  # rows of the model beyond the tokenizer's, and far likelier than all others
SHARED = [*range(100, 180)]
PROMPTS = [[*SHARED, *range(last, last + 20)] for last in range(10, 34, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Oracle]:
    directory = tmp_path_factory.mktemp("model")
    tokens = write_byte_bpe(directory)
    return str(directory), Oracle(write_checkpoint(directory, "llama", SMALL, tokens, PADDING), tokens)


@pytest.fixture(scope="module")
def llm(model: tuple[str, Oracle]) -> Iterator[LLM]:
    with LLM(model[0], kv_cache_memory_bytes="32MiB", max_num_batched_tokens=48, threads=1) as llm:
        yield llm


def assert_exact(
    entries: list[TokenLogprob | None] | None, prompt: list[int], oracle: Oracle, k: int, start: int = 0
) -> None:
    """log_softmax of the oracle's logits, to 1e-4; ranks and likeliest tokens where they are clear."""
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(prompt) - start
    want = torch.log_softmax(oracle.logits(prompt), -1)[start:-1]
    found = [entry for entry in entries if entry is not None]
    assert [entry.token_id for entry in found] == prompt[start + 1 :]
    chosen = want.gather(1, torch.tensor(prompt[start + 1 :])[:, None])
    torch.testing.assert_close(torch.tensor([[e.logprob] for e in found]), chosen, atol=1e-4, rtol=0)
    above, below = (want > chosen + 2e-4).sum(1), (want > chosen - 2e-4).sum(1)
    for entry, low, high in zip(found, above.tolist(), below.tolist()):
        assert low < entry.rank <= max(high, low + 1)
    if k:
        values = torch.tensor([[value for _, value in e.top] for e in found])
        torch.testing.assert_close(values, want.topk(k).values, atol=1e-4, rtol=0)
        ids = torch.tensor([[token for token, _ in e.top] for e in found])
        torch.testing.assert_close(want.gather(1, ids), values, atol=1e-4, rtol=0)


def test_chunks_of_several_prompts_at_once(llm: LLM, model: tuple[str, Oracle]) -> None:
    """48 tokens a step, so that every step has pieces of prompts and of answers."""
    each = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=k)
        for k in (0, 1, 5, None, 20, 3, None, 2)
    ]
    llm.reset_prefix_cache()
    for result, params in zip(llm.generate(PROMPTS, each), each):
        assert len(result.outputs[0].token_ids) == 12
        if params.prompt_logprobs is None:
            assert result.prompt_logprobs is None
        else:
            assert_exact(result.prompt_logprobs, result.prompt_token_ids, model[1], params.prompt_logprobs)


def test_log_probabilities_of_answers(llm: LLM, model: tuple[str, Oracle]) -> None:
    """As exact as those of prompts, whatever bias and penalties did to the draw."""
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": 4, "seed": 1}
    each = [
        SamplingParams(**common, temperature=0),
        SamplingParams(**common, temperature=2.0, top_p=0.9),
        SamplingParams(**common, temperature=0, repetition_penalty=1.8, frequency_penalty=2.0),
        SamplingParams(**common, temperature=1.0, logit_bias={7: 100.0}),
    ]
    for result in llm.generate(PROMPTS[:4], each):
        (answer,) = result.outputs
        tokens = [*result.prompt_token_ids, *answer.token_ids]
        told = [None] * len(result.prompt_token_ids) + (answer.logprobs or [])
        start = len(result.prompt_token_ids) - 1
        assert_exact([None, *told[start + 1 :]], tokens, model[1], 4, start)


def test_the_cache_is_not_read_but_filled(llm: LLM, model: tuple[str, Oracle]) -> None:
    llm.reset_prefix_cache()
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    for params, cached in ((scored, 0), (scored, 0), (plain, 96)):
        (result,) = llm.generate(PROMPTS[0], params)
        assert result.cached_tokens == cached
        if params is scored:
            assert_exact(result.prompt_logprobs, PROMPTS[0], model[1], 1)


def test_logits_are_made_in_pieces(
    llm: LLM, model: tuple[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = llm._engine.runner._scorer
    sizes: list[int] = []

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return llm._engine.runner.model.compute_logits(hidden)

    monkeypatch.setattr(scorer, "_rows", 7)
    monkeypatch.setattr(scorer, "_compute_logits", compute)
    (result,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert_exact(result.prompt_logprobs, PROMPTS[0], model[1], 2)
    assert max(sizes) == 7
    assert sum(sizes) == len(PROMPTS[0]) - 1
    big = scoring.PromptScorer(compute, 150_000, 150_000)
    assert big._rows * 150_000 * 4 <= scoring.MOST_BYTES


def test_preemption_tells_nothing_twice(model: tuple[str, Oracle]) -> None:
    """Few pages: prompts and answers push each other out, in the middle of a prompt too."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=2)
    for chunk in (16, 256):
        with LLM(model[0], num_gpu_blocks_override=22, max_num_batched_tokens=chunk, threads=1) as few:
            results = few.generate(PROMPTS, params)
            assert few.stats.preemptions > 0
            assert few.check_integrity() == ""
        for result in results:
            assert_exact(result.prompt_logprobs, result.prompt_token_ids, model[1], 2)


def test_two_steps_in_flight(model: tuple[str, Oracle]) -> None:
    """As on a GPU, with as few pages as above."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=2)
    with LLM(model[0], num_gpu_blocks_override=22, max_num_batched_tokens=32, threads=1) as few:
        want = few.generate(PROMPTS, params)
        overlap_steps(few)
        results = few.generate(PROMPTS, params)
        assert few.stats.preemptions > 0
        assert few.check_integrity() == ""
    for result, expected in zip(results, want):
        assert result.outputs[0].token_ids == expected.outputs[0].token_ids
        assert_exact(result.prompt_logprobs, result.prompt_token_ids, model[1], 2)


def test_only_the_prompt_when_no_tokens_are_asked_for(llm: LLM, model: tuple[str, Oracle]) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    longest = llm.info.max_model_len
    before = llm.stats.generation_tokens
    for prompt in ([5], [5, 6], PROMPTS[1]):
        (result,) = llm.generate(prompt, params)
        assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([], "length")
        assert result.outputs[0].text == ""
        if len(prompt) > 1:
            assert_exact(result.prompt_logprobs, prompt, model[1], 1)
        else:
            assert result.prompt_logprobs == [None]
    assert llm.stats.generation_tokens == before
    assert llm.check_integrity() == ""
    with pytest.raises(ValueError, match=f"{longest + 1} tokens; max_model_len is {longest}"):
        llm.generate([5] * (longest + 1), params)


def test_several_answers_tell_it_once(llm: LLM, model: tuple[str, Oracle]) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    (result,) = llm.generate(PROMPTS[2], params)
    assert len(result.outputs) == 3
    assert_exact(result.prompt_logprobs, PROMPTS[2], model[1], 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be a whole number from 0 to 20, not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number from 0 to 20, not -1"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to"),
        ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n must be 1 with max_tokens 0"),
        ({"max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 1}, "must not exceed max_tokens"),
    ],
    ids=str,
)
def test_bounds(fields: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**fields)
