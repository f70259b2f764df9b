"""Cases from the field against a whole worker: real engine, small random model, SentencePiece text."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.worker.fake_engine import events, strict_json
from tests.worker.random_models import SMALL, Oracle, write_checkpoint, write_sentencepiece
from tests.worker.real_worker import RealWorker, real_worker, wait_until
from worker import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)

OPTIONS = ("--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "64", "--max-num-batched-tokens", "128")
PADDING = 50  # rows of the model beyond the tokenizer's
TEXTS = ("hello world", "held, or", "wow é中")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle, int]:
    """Directory, oracle, and number of tokens."""
    directory = tmp_path_factory.mktemp("model")
    tokens = write_sentencepiece(directory)
    oracle = Oracle(write_checkpoint(directory, "llama", SMALL, tokens, PADDING), tokens)
    return directory, oracle, tokens


@pytest.fixture(scope="module")
def worker(
    checkpoint: tuple[Path, Oracle, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealWorker]:
    with real_worker(tmp_path_factory.mktemp("worker"), checkpoint[0], *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Oracle, int]) -> Iterator[LLM]:
    with LLM(str(checkpoint[0]), kv_cache_memory_bytes="32MiB", max_num_seqs=64, threads=1) as llm:
        yield llm


def test_offline_text_is_the_text_over_http(worker: RealWorker, llm: LLM) -> None:
    """Also its leading space, which a SentencePiece decoder drops from a text of its own."""
    params = SamplingParams(temperature=0, max_tokens=24)
    results = llm.generate(list(TEXTS), params)
    answers = worker.post("/v1/completions", prompt=list(TEXTS), temperature=0, max_tokens=24).json()
    assert [result.outputs[0].text for result in results] == [one["text"] for one in answers["choices"]]
    reasons = [one["finish_reason"] for one in answers["choices"]]
    assert [result.outputs[0].finish_reason for result in results] == reasons
    for text, result in zip(TEXTS, results):
        native = worker.post("/generate", prompt=text, temperature=0, max_tokens=24).json()
        assert native["token_ids"] == result.outputs[0].token_ids
        (by_ids,) = llm.generate(result.prompt_token_ids, params)
        assert by_ids.outputs[0].text == native["text"] == result.outputs[0].text


def test_a_text_that_goes_on_keeps_its_space(worker: RealWorker, llm: LLM) -> None:
    assert llm.tokenizer is not None
    space_hello = llm.tokenizer.encode("hello", add_special_tokens=False)[0]
    forced = {"logit_bias": {str(space_hello): 100.0}, "max_tokens": 2, "temperature": 0}
    over_http = worker.post("/v1/completions", prompt="world", **forced).json()["choices"][0]["text"]
    params = SamplingParams(logit_bias={space_hello: 100.0}, max_tokens=2, temperature=0)
    assert over_http == llm.generate("world", params)[0].outputs[0].text == " hello hello"


def test_an_end_that_only_the_tokenizer_knows_ends_the_answer(worker: RealWorker, llm: LLM) -> None:
    assert llm.tokenizer is not None
    (end,) = llm.tokenizer.eos_token_ids
    bias = {end: 100.0}
    (offline,) = llm.generate("hello", SamplingParams(logit_bias=bias, max_tokens=9))[0].outputs
    (online,) = worker.post(
        "/v1/completions", prompt="hello", logit_bias={str(end): 100.0}, max_tokens=9
    ).json()["choices"]
    assert (offline.text, offline.finish_reason) == (online["text"], online["finish_reason"]) == ("", "stop")
    assert offline.token_ids == [end]
    params = SamplingParams(logit_bias=bias, max_tokens=9, ignore_eos=True)
    assert llm.generate("hello", params)[0].outputs[0].token_ids == [end] * 9


def test_tokens_are_those_of_transformers_and_never_padding(
    worker: RealWorker, checkpoint: tuple[Path, Oracle, int]
) -> None:
    """The padded rows have the largest logits by far."""
    _, oracle, tokens = checkpoint
    fields = {"prompt": TEXTS[0], "max_tokens": 40, "ignore_eos": True}
    greedy = worker.post("/generate", **fields, temperature=0).json()["token_ids"]
    prompt = worker.post("/tokenize", prompt=TEXTS[0]).json()["tokens"]
    expected = oracle.clear_greedy(prompt, greedy)
    assert greedy[: len(expected)] == expected
    assert len(set(expected)) >= 15
    for seed in range(8):
        sampled = worker.post("/generate", **fields, temperature=2.0, seed=seed).json()["token_ids"]
        assert max(sampled) < tokens
    biased = worker.post("/generate", **fields, logit_bias={str(tokens): 100})
    assert (biased.status_code, biased.json()["error"]["param"]) == (400, "logit_bias")


def test_logprobs_are_strict_json_and_name_no_padding(
    worker: RealWorker, checkpoint: tuple[Path, Oracle, int]
) -> None:
    tokens = checkpoint[2]
    bias = {str(token): -100 for token in range(0, tokens, 2)}
    answer = worker.post(
        "/generate", prompt="hello", max_tokens=8, logprobs=20, logit_bias=bias, temperature=0
    )
    for entry in strict_json(answer.content)["logprobs"]:
        assert entry["token_id"] % 2 == 1
        assert len(entry["top"]) == 20
        assert all(top["token_id"] < tokens for top in entry["top"])
        assert entry["logprob"] <= 0


def test_tenants_share_no_prefix_unless_they_share_a_salt(worker: RealWorker) -> None:
    def cached(salt: str | None) -> int:
        fields = {"prompt": [7] * 64, "max_tokens": 1, "cache_salt": salt}
        answer = worker.post("/v1/completions", **fields).json()
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    worker.client.post("/admin/reset_prefix_cache")
    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 48, 48, 48]


EXTREMES: list[dict[str, Any]] = [
    {"repetition_penalty": 0.01, "prompt": list(range(300))},
    {"repetition_penalty": 0.01, "prompt": list(range(300)), "temperature": 1.0001e-5},
    {"repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": 2},
    {"temperature": 1.0001e-5},
    {"temperature": 1e-300},
    {"temperature": 2, "top_p": 1e-300},
    {"temperature": 2, "top_k": 2**31, "min_p": 1.0},
    {"temperature": 2, "top_k": 1, "top_p": 1.0, "min_p": 1e-300},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop_token_ids": [2**31, 0]},
    {"stop_token_ids": list(range(256)), "min_tokens": 6},
    {"logit_bias": {str(token): -100 for token in range(300)}},
    {"logit_bias": {str(token): 100 for token in range(300)}, "logprobs": 20},
    {"logprobs": 0},
    {"max_tokens": 1, "min_tokens": 1, "stop": ["\x00", "é" * 1024]},
    {"priority": 10**6, "cache_salt": "\x00" * 256},
    {"allowed_token_ids": [7]},
    {"allowed_token_ids": [7] * 16_384, "min_tokens": 6},
    {"bad_words": [chr(0x4E00 + i) * 32 for i in range(256)]},
    {"bad_words": ["hello", "w"], "truncate_prompt_tokens": 1},
    {"prompt_logprobs": 20, "prompt": list(range(300))},
    {"prompt_logprobs": 0, "prompt": [5]},
    {"truncate_prompt_tokens": -1},
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda fields: ascii(fields)[:40])
def test_the_ends_of_every_range_are_served(worker: RealWorker, extreme: dict[str, Any]) -> None:
    """What the bounds let in is answered; none of it is the server's failure."""
    fields = {"prompt": "hello world hello", "max_tokens": 6, **extreme}
    answer = worker.post("/generate", **fields)
    assert answer.status_code == 200, answer.text
    assert 0 < len(strict_json(answer.content)["token_ids"]) <= 6


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_prompt_logprobs_are_those_of_transformers(
    worker: RealWorker, checkpoint: tuple[Path, Oracle, int], path: str
) -> None:
    """The same on every path, also of a prompt that is cached."""
    prompt = TEXTS[0] * 20
    tokens = worker.post("/tokenize", prompt=prompt).json()["tokens"]
    for _ in range(2):
        body = strict_json(worker.post(path, prompt=prompt, prompt_logprobs=2, max_tokens=1).content)
        told = body["choices"][0]["prompt_logprobs"] if path == "/v1/completions" else body["prompt_logprobs"]
        want = torch.log_softmax(checkpoint[1].logits(tokens), -1)
        assert told[0] is None
        assert len(told) == len(tokens) == body["usage"]["prompt_tokens"]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for place, (token, entry) in enumerate(zip(tokens[1:], told[1:])):
            if path == "/generate":
                found = {str(entry["token_id"]): entry["logprob"]}
                found |= {str(top["token_id"]): top["logprob"] for top in entry["top"]}
            else:
                found = {name: value["logprob"] for name, value in entry.items()}
            assert next(iter(found)) == str(token)
            assert 2 <= len(found) <= 3
            for name, value in found.items():
                assert value == pytest.approx(float(want[place, int(name)]), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("ends", [False, True])
def test_continuations_are_scored_as_lm_eval_does_it(
    worker: RealWorker, llm: LLM, checkpoint: tuple[Path, Oracle, int], max_tokens: int, ends: bool
) -> None:
    """`echo` with `logprobs: 1` over token ids; an answer of one token is cut off, whichever it is."""
    _, oracle, vocabulary = checkpoint
    assert llm.tokenizer is not None
    prompts = [[(7 * i + 3 * j) % (vocabulary - 20) + 10 for j in range(20 + i)] for i in range(4)]
    context = 12
    for prompt in prompts[:2]:  # continuations that are what the model would say
        for place in range(context, len(prompt)):
            prompt[place] = int(oracle.logits(prompt[:place])[-1].argmax())
    fields: dict[str, Any] = {"prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    if ends:
        fields["logit_bias"] = {str(llm.tokenizer.eos_token_ids[0]): 100}
    body = strict_json(worker.post("/v1/completions", **fields, max_tokens=max_tokens).content)
    assert body["usage"]["completion_tokens"] == len(prompts) * max_tokens
    for i, (prompt, choice) in enumerate(zip(prompts, body["choices"])):
        logprobs = choice["logprobs"]
        end = len(logprobs["token_logprobs"]) - max_tokens
        assert end == len(prompt)
        scores = logprobs["token_logprobs"][context:end]
        greedy = all(
            score == max(top.values()) for score, top in zip(scores, logprobs["top_logprobs"][context:end])
        )
        want = torch.log_softmax(oracle.logits(prompt), -1)[:-1]
        own = want.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)[context - 1 :]
        assert sum(scores) == pytest.approx(float(own.sum()), abs=1e-3)
        assert greedy == (i < 2)
        assert choice["text"][: logprobs["text_offset"][-1]]


def test_words_that_must_not_come(worker: RealWorker, llm: LLM) -> None:
    """A word of three tokens, where hardly anything but its tokens comes otherwise; online and offline."""
    assert llm.tokenizer is not None
    word = llm.tokenizer.encode("orld", add_special_tokens=False)
    assert len(word) >= 3
    bias = {str(token): 100.0 for token in word}
    fields: dict[str, Any] = {
        "prompt": "hello",
        "max_tokens": 200,
        "temperature": 2.0,
        "logit_bias": bias,
        "ignore_eos": True,
    }

    def told(tokens: list[int]) -> int:
        return sum(tokens[i : i + len(word)] == word for i in range(len(tokens)))

    free = worker.post("/generate", **fields, seed=1).json()["token_ids"]
    held = worker.post("/generate", **fields, seed=1, bad_words=["orld"]).json()["token_ids"]
    assert told(free) > 0
    assert told(held) == 0
    assert set(held) == set(word)
    own = {"logit_bias": dict.fromkeys(word, 100.0), "bad_words": ("orld",), "seed": 1}
    params = SamplingParams(max_tokens=200, temperature=2.0, ignore_eos=True, **own)
    assert llm.generate("hello", params)[0].outputs[0].token_ids == held
    only = worker.post("/generate", **fields, allowed_token_ids=word[:1]).json()["token_ids"]
    assert only == word[:1] * 200


async def test_a_seed_gives_the_same_alone_and_among_64(worker: RealWorker) -> None:
    def fields(number: int) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": "hello world " * (1 + number % 7),
            "max_tokens": 10 + number % 11,
            "temperature": 0.7 + number % 3 / 4,
            "top_p": 0.9,
            "seed": number,
            "ignore_eos": True,
        }

    async with worker.async_client() as client:
        alone = [(await client.post("/generate", json=fields(number))).json() for number in range(0, 64, 9)]
        together = await asyncio.gather(
            *(client.post("/generate", json=fields(number)) for number in range(64))
        )
    assert [one["token_ids"] for one in alone] == [one.json()["token_ids"] for one in together[::9]]
    assert len({tuple(one["token_ids"]) for one in alone}) == len(alone)


def json_lines(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """httpx's own iter_lines also ends a line at what a text may have, such as U+2028."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)


def test_a_long_prompt_does_not_starve_a_stream(worker: RealWorker) -> None:
    """10,000 tokens in chunks of at most 127 are 79 steps, and each of them brings the stream a token."""
    stream = {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    answered = threading.Event()

    def ask() -> None:
        answer = worker.post("/generate", prompt=[5] * 10_000, max_tokens=1, temperature=0)
        assert answer.status_code == 200
        answered.set()

    with worker.client.stream("POST", "/generate_stream", json=stream) as answer:
        lines = json_lines(answer)
        next(lines)
        asking = threading.Thread(target=ask)
        asking.start()
        between = []
        while not answered.is_set():
            between.append(len(next(lines)["token_ids"]))
        asking.join()
    assert sum(between) >= 75
    assert len(between) >= 10, "the stream stood still for much of the prompt"


def test_sigterm_lets_a_stream_finish(checkpoint: tuple[Path, Oracle, int], tmp_path: Path) -> None:
    with real_worker(tmp_path, checkpoint[0], *OPTIONS) as running:
        engine = running.engine
        stream = {"model": "tiny", "prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=stream) as answer:
            parts = answer.iter_text()
            text = next(parts)
            running.process.terminate()
            text += "".join(parts)
        chunks = events(text)
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(60) == 0
        assert not engine.is_running()


def test_a_killed_server_takes_its_engine_along(worker: RealWorker) -> None:
    """The last of this worker's tests."""
    engine = worker.engine
    stream = {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with worker.client.stream("POST", "/v1/completions", json=stream) as answer:
        next(answer.iter_bytes())
        worker.process.kill()
        wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
