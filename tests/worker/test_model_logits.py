"""Every architecture against transformers' own class: the same checkpoint, logits and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.worker.llama_cpp import convert
from tests.worker.paged import PagedRun, one_thread
from tests.worker.random_models import randomise, write_byte_bpe
from tests.worker.variants import VARIANTS, VOCAB
from worker import LLM, SamplingParams
from worker.model.layers import CausalLM
from worker.weights.loader import load_model
from worker.weights.source import resolve_source

TOKENS = 400  # of the tokenizer: fewer than the models have rows for
LENGTH = 90  # tokens of the compared text: several pages, and more than windows and original lengths
TIE = 1e-3  # a gap between the best two logits below which either may be chosen
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def load(source: Path, max_model_len: int) -> CausalLM:
    return load_model(
        resolve_source(str(source)), dtype=torch.float32, device="cpu", max_model_len=max_model_len
    )


class Pair:
    """A checkpoint on disk, loaded by transformers and by us."""

    def __init__(self, name: str, directory: Path) -> None:
        self.variant = VARIANTS[name]
        self.directory = directory
        self.theirs = self.variant.model(self.variant.config).eval()
        randomise(self.theirs)
        shards = {"max_shard_size": "1MB"} if name == "llama 3:1" else {}
        self.theirs.save_pretrained(directory, **shards)
        assert (directory / "model.safetensors.index.json").exists() == bool(shards)
        self.ours = load(directory, self.variant.max_model_len)
        self.tokens: list[int] = torch.randint(
            0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)
        ).tolist()
        self.expected = self.their_logits(self.tokens)

    @property
    def switch(self) -> int | None:
        """Length above which sequences are rotated otherwise, if the model takes such."""
        switch = self.ours.config.rope.switch
        return switch if switch is not None and switch < self.variant.max_model_len else None

    @torch.no_grad()
    def their_logits(self, tokens: list[int], longest: int | None = None) -> Tensor:
        """Of a sequence that may get as long as `longest`, or the model takes: transformers rotates by the
        length of the text, so it gets a text of that length."""
        longest = longest or self.variant.max_model_len
        long = self.switch is not None and longest > self.switch
        text = tokens + [0] * (self.variant.max_model_len - len(tokens)) if long else tokens
        if self.switch is not None:
            self.theirs(torch.tensor([[0]]))  # it keeps a long text's frequencies until a short one comes
        return self.theirs(torch.tensor([text]), use_cache=False).logits[0, : len(tokens)]

    def clear_greedy(self, prompt: list[int], answer: list[int], longest: int | None = None) -> list[int]:
        """Their choice at every place of `answer`, up to the first that is a tie: one pass over our text.
        Rows of the output layer that the tokenizer has no token for are padding."""
        logits = self.their_logits(prompt + answer, longest)[len(prompt) - 1 : -1]
        best = logits[:, :TOKENS].topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        clear = next((i for i, gap in enumerate(gaps) if gap < TIE), len(gaps))
        return best.indices[:clear, 0].tolist()

    def run(self, model: CausalLM | None = None) -> PagedRun:
        model = model or self.ours
        return PagedRun(model, first_row=model.first_row(self.variant.max_model_len))


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    assert write_byte_bpe(directory, TOKENS) == TOKENS
    return str(directory)


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error.item() < 1e-4


def chunks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def test_logits_at_once_by_chunks_and_by_tokens(pair: Pair) -> None:
    run = pair.run()
    assert_close(run.feed({"all": pair.tokens})["all"], pair.expected)
    mixed = [16, 7, 1, 1, 40, 1, 15, 9]
    for name, sizes in {"mixed": mixed, "tokens": [1] * 30}.items():
        found = torch.cat([run.feed({name: part})[name] for part in chunks(pair.tokens, sizes)])
        assert_close(found, pair.expected[: sum(sizes)])


def test_sequences_in_one_batch_dont_meet(pair: Pair) -> None:
    run = pair.run()
    reverse = pair.tokens[::-1]
    run.feed({"a": pair.tokens[:33], "b": reverse[:5]})
    found = run.feed({"a": pair.tokens[33:34], "b": reverse[5:], "c": pair.tokens[:20]})
    assert_close(found["a"], pair.expected[33:34])
    assert_close(found["c"], pair.expected[:20])
    assert_close(found["b"], pair.their_logits(reverse)[5:])


@torch.inference_mode()
def test_states_of_some_tokens_only(pair: Pair) -> None:
    """They are the same, and so is what the cache holds for later steps."""
    run, other = pair.run(), pair.run()
    tokens, rows = torch.tensor(pair.tokens[:20]), torch.tensor([19, 4])
    every = pair.ours.forward(tokens, run.batch(["s"], [20]), run.caches)
    some = pair.ours.forward(tokens, other.batch(["s"], [20]), other.caches, rows)
    torch.testing.assert_close(some, every[rows], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(run.caches[-1], other.caches[-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


def test_fills_every_parameter(pair: Pair) -> None:
    ours: CausalLM = pair.ours
    count = sum(p.numel() for p in pair.theirs.parameters())
    assert sum(p.numel() for p in ours.parameters()) == count
    assert ours.weight_bytes == 4 * count


def read_back(path: Path) -> PreTrainedModel:
    """The model that transformers' own GGUF loader makes of the file."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.pad_token_id = None  # Phi-3's default is beyond a small vocabulary
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    model.tie_weights()
    return model


def test_gguf(pair: Pair) -> None:
    """The same model from llama.cpp's file, also where transformers reads that itself."""
    if not pair.variant.gguf:
        return
    path = convert(pair.theirs, pair.directory / "gguf" / "model.gguf")
    model = load(path, pair.variant.max_model_len)
    assert_close(pair.run(model).feed({"all": pair.tokens})["all"], pair.expected)
    assert model.config.context_length == pair.ours.config.context_length
    known = min(pair.variant.known, LENGTH)
    if known:
        with torch.no_grad():
            logits = read_back(path)(torch.tensor([pair.tokens]), use_cache=False).logits[0]
        assert_close(logits[:known], pair.expected[:known])


def test_the_engine_by_chunks_preempted_and_from_its_cache(pair: Pair, tokenizer: str) -> None:
    """Sixty-four greedy tokens of prompts with a common beginning, in too few pages, 16 tokens a step."""
    tokens = [token % TOKENS for token in pair.tokens]  # those that the tokenizer knows
    prompts = [tokens[:40] + tokens[at : at + 5] for at in (41, 50, 60)]
    with LLM(
        str(pair.directory),
        tokenizer=tokenizer,
        max_model_len=pair.variant.max_model_len,
        num_gpu_blocks_override=12,
        max_num_batched_tokens=16,
        max_num_seqs=3,
        threads=1,
    ) as llm:
        results = llm.generate(prompts, GREEDY)
        assert llm.stats.preemptions > 0
        again = llm.generate(prompts[0], GREEDY)
        assert again[0].cached_tokens >= 32
        assert llm.check_integrity() == ""
    for result in [*results, *again]:
        answer = result.outputs[0].token_ids
        clear = pair.clear_greedy(result.prompt_token_ids, answer)
        assert len(answer) == 64
        assert answer[: len(clear)] == clear
    assert max(len(set(pair.clear_greedy(r.prompt_token_ids, r.outputs[0].token_ids))) for r in results) >= 20


def test_how_long_a_request_may_get_says_how_it_is_rotated(pair: Pair, tokenizer: str) -> None:
    """Also of two with the same prompt, in one batch: neither finds the other's pages in the cache."""
    if pair.switch is None:
        return
    prompt = [token % TOKENS for token in pair.tokens[:40]]
    lengths = [pair.switch, pair.switch + 1, pair.variant.max_model_len]
    params = [SamplingParams(temperature=0, max_tokens=n - len(prompt), ignore_eos=True) for n in lengths]
    plenty = {"tokenizer": tokenizer, "max_model_len": lengths[-1], "kv_cache_memory_bytes": "8MiB"}
    with LLM(str(pair.directory), threads=1, **plenty) as llm:
        first, second = (llm.generate([prompt] * 3, params) for _ in range(2))
    for results in (first, second):
        for result, longest in zip(results, lengths, strict=True):
            answer = result.outputs[0].token_ids
            clear = pair.clear_greedy(prompt, answer, longest)
            assert answer[: len(clear)] == clear
            assert len(clear) > 4
    assert [result.cached_tokens for result in second] == [32] * 3
    short, long = (result.outputs[0].token_ids[: lengths[0] - len(prompt)] for result in first[:2])
    assert short != long
