"""What may not be sampled: allowed tokens, bad words, ends before min_tokens; also with a token unread."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from tests.worker.overlapped import overlap_steps
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM
from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams
from worker.request import Request
from worker.runner.sampler import NOTHING_LEFT, Sampler

CPU = torch.device("cpu")
V = 12
END = 0


def request(row: int, outputs: tuple[int, ...] = (), unread: int = 0, **params: object) -> Request:
    """One that has brought `outputs`, the last `unread` of which the host doesn't know."""
    message = EngineRequest(f"r{row}", [1, 2], SamplingParams(temperature=0, **params), 0)  # type: ignore[arg-type]
    made = Request(message, max_model_len=1000, eos_token_ids=frozenset({END}), number=row)
    made.tokens += outputs[: len(outputs) - unread]
    made.row = row
    made.pending = unread + 1
    return made


def masked(rows: list[Request], last_tokens: torch.Tensor | None = None) -> list[set[int]]:
    """Which tokens are out of the question for each request. Rows of the logits lie apart, as they do where
    the output layer's rows are padded."""
    sampler = Sampler(V, V, CPU, last_tokens)
    logits = torch.zeros(len(rows), V + 4)[:, :V]
    sampler.begin(rows)
    sampler.sample(logits, rows)
    assert torch.equal(logits.isinf(), logits == -torch.inf)
    return [set(row.isinf().nonzero().flatten().tolist()) for row in logits]


def test_each_request_has_its_own_masks():
    rows = [
        request(3),
        request(7, allowed_token_ids=(2, 5)),
        request(1, bad_words_token_ids=((4,), (6,))),
        request(0, min_tokens=2, outputs=(9,)),
        request(2, min_tokens=1, outputs=(9,)),
        request(6, allowed_token_ids=(2, 5, END), bad_words_token_ids=((5,),), min_tokens=1),
    ]
    others = set(range(V))
    assert masked(rows) == [set(), others - {2, 5}, {4, 6}, {END}, set(), others - {2}]


def test_a_row_taken_over_forgets_the_masks_of_the_request_before():
    sampler = Sampler(V, V, CPU)
    sampler.begin([request(3, allowed_token_ids=(2,))])
    for follower, want in ((request(3), [7]), (request(3, bad_words_token_ids=((7,),)), [4])):
        sampler.begin([follower])
        logits = torch.zeros(1, V)
        logits[0, 7], logits[0, 4] = 2.0, 1.0
        assert sampler.sample(logits, [follower]).read()[0] == want


@pytest.mark.parametrize("unread", [0, 1])
def test_bad_words_as_transformers_masks_them(unread: int):
    """Every output of up to three tokens over a small alphabet; the host knows all of it, or all but the
    last."""
    words = ((3,), (3, 4), (4, 4), (3, 4, 5), (5, 3, 3, 4))
    outputs = [
        list(tokens) for length in range(unread, 4) for tokens in itertools.product((3, 4, 5), repeat=length)
    ]
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=END)
    rows = [request(i, tuple(output), unread, bad_words_token_ids=words) for i, output in enumerate(outputs)]
    last = torch.tensor([output[-1] if output else END for output in outputs])
    found = masked(rows, last)
    for output, out in zip(outputs, found, strict=True):
        # Our words end in the output, so the prompt is left out; a token that is no part of any stands in.
        want = processor(torch.tensor([[9, *output]]), torch.zeros(1, V))
        assert out == set(want[0].isinf().nonzero().flatten().tolist()), output


def test_a_bad_word_never_begins_in_the_prompt():
    """The prompt ends with 2."""
    words = ((2, 7), (1, 2, 8))
    assert masked([request(0, bad_words_token_ids=words)]) == [set()]
    assert masked([request(0, (2,), bad_words_token_ids=words)]) == [{7}]
    last = torch.tensor([2])
    assert masked([request(0, (2,), 1, bad_words_token_ids=words)], last) == [{7}]


def test_overlapped_steps_never_bring_a_bad_word():
    """As the loop runs them on a GPU: a step is launched before the token of the one before is read."""
    words = ((3, 4), (4, 5), (5, 3), (6, 6, 6), (7, 8, 9))
    rng = random.Random(4)
    tempted: Counter[tuple[int, ...]] = Counter()
    for seed in range(40):
        last_tokens = torch.zeros(1, dtype=torch.int64)
        sampler = Sampler(V, V, CPU, last_tokens)
        params = SamplingParams(
            bad_words_token_ids=words, logit_bias={3: 2, 4: 2, 5: 2, 6: 4, 7: 3, 8: 3, 9: 3}
        )
        row = Request(
            EngineRequest("r", [1], params, seed), max_model_len=99, eos_token_ids=frozenset(), number=1
        )
        row.row = 0
        sampler.begin([row])
        unread: list[int] = []
        for _ in range(30):
            row.pending += 1
            sampled = sampler.sample(torch.zeros(1, V), [row])
            last_tokens[0] = sampled.tokens[0]
            unread += sampled.read()[0]
            if len(unread) > 1 or rng.random() < 0.3:  # sometimes the host has caught up
                row.tokens.append(unread.pop(0))
                row.pending -= 1
                while unread and rng.random() < 0.3:
                    row.tokens.append(unread.pop(0))
                    row.pending -= 1
        output = [*row.tokens[1:], *unread]
        for word in words:
            assert not ends(word, output)
            tempted[word] += len(ends(word[:-1], output))
    assert min(tempted.values()) > 5


def test_an_engine_with_two_steps_in_flight(tmp_path: Path) -> None:
    """What a model says by itself, banned in pieces of two and three tokens, on and off."""
    write_checkpoint(tmp_path, "llama", SMALL, write_byte_bpe(tmp_path))
    prompts = [[*range(20 + i, 60 + 2 * i)] for i in range(8)]
    with LLM(str(tmp_path), kv_cache_memory_bytes="32MiB", max_num_batched_tokens=64, threads=1) as llm:

        def generate(banned: list[tuple[tuple[int, ...], ...]]) -> list[list[int]]:
            each = [
                SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words_token_ids=words)
                for words in banned
            ]
            return [result.outputs[0].token_ids for result in llm.generate(prompts, each)]

        said = generate([()] * len(prompts))
        banned = [((*t[4:6],), (*t[10:13],), (t[20],)) if i % 4 else () for i, t in enumerate(said)]
        want = generate(banned)
        overlap_steps(llm)
        assert generate(banned) == want
    for before, after, words in zip(said, want, banned):
        assert (before == after) == (not words)
        assert not any(ends(word, after) for word in words)


def test_the_engine_refuses_what_nobody_has_fitted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", SMALL, write_byte_bpe(tmp_path))
    with LLM(str(tmp_path), kv_cache_memory_bytes="32MiB", threads=1) as llm:
        outside = llm.info.vocab_size + 500
        for params in (
            SamplingParams(bad_words=("a",)),
            SamplingParams(bad_words_token_ids=((1, outside),)),
            SamplingParams(allowed_token_ids=(1, outside)),
        ):
            output = llm._engine.add(EngineRequest("r", [1, 2], params, 0))
            assert output is not None
            assert output.finish_reason == "error"
            if not params.bad_words:
                with pytest.raises(ValueError, match=f"names token {outside}"):
                    llm.generate([1, 2], params)
        assert not llm._engine.has_work


def ends(word: tuple[int, ...], output: list[int]) -> list[int]:
    """Where `word` ends in `output`."""
    return [i for i in range(len(word), len(output) + 1) if tuple(output[i - len(word) : i]) == word]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_leaves_itself_no_token_is_told_so_and_hurts_no_other(temperature: float):
    params = SamplingParams(temperature=temperature, allowed_token_ids=(3,), bad_words_token_ids=((3, 3),))
    rows = []
    for i in range(3):
        row = request(i, (3,) if i == 1 else (4,))
        row.params = params
        row.shaped_for = 99
        rows.append(row)
    sampler = Sampler(V, V, CPU)
    sampler.begin(rows)
    assert sampler.sample(torch.zeros(3, V), rows).read()[0] == [3, NOTHING_LEFT, 3]
