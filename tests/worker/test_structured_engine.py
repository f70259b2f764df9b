"""Answers with forms in the whole engine, with a small random model: batches, ends, preemption, overlap."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams, StructuredOutputs
from worker.engine import grammars
from worker.grammar import constraint
from worker.grammar.compiling import compile_matcher
from worker.grammar.constraint import Constraint, Original
from worker.ipc.messages import EngineRequest, RequestOutput
from worker.llm import RequestOutput as Result

OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 512, "max_num_seqs": 8}
PADDING = 60  # rows of the output layer beyond the tokenizer's
DEADLINE = 100.0
CODE = StructuredOutputs(regex="[a-f]{4}-[0-9]{3}")
LONG = StructuredOutputs(regex="([a-z]{5} ){6}")
PROMPTS = ["The fleet", "A worker reads the prompt, page by page,", "1, 2, 3, 5, 8", "The gateway"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ship", "é\n"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "sizes", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    write_checkpoint(folder, "llama", SMALL, write_byte_bpe(folder), PADDING)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def drawn(form: StructuredOutputs | None, seed: int = 0, **fields: Any) -> SamplingParams:
    fields = {"max_tokens": 120, "temperature": 1.0, **fields}
    return SamplingParams(seed=seed, structured_outputs=form, **fields)


def text(result: Result) -> str:
    return result.outputs[0].text


def reason(result: Result) -> str | None:
    return result.outputs[0].finish_reason


def tokens(results: Sequence[Result]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_forms_of_all_kinds_in_one_batch_beside_answers_without(llm: LLM) -> None:
    forms = [
        None,
        StructuredOutputs(json=SCHEMA),
        CODE,
        StructuredOutputs(choice=("ja", "nein")),
        None,
        StructuredOutputs(grammar='root ::= "<" [a-c]+ ">" | "none"'),
        StructuredOutputs(grammar='start: "x" NUMBER\nNUMBER: /[0-9]{2}/'),
    ]
    params = [drawn(form, seed, logprobs=1) for seed, form in enumerate(forms)]
    results = llm.generate(["The fleet"] * len(forms), params)
    jsonschema.validate(json.loads(text(results[1])), SCHEMA)
    for result, pattern in zip(
        results[2:], ["[a-f]{4}-[0-9]{3}", "ja|nein", None, "<[a-c]+>|none", "x[0-9]{2}"]
    ):
        if pattern is not None:
            assert re.fullmatch(pattern, text(result)), text(result)
            assert reason(result) == "stop"
            assert llm.tokenizer is not None
            assert result.outputs[0].token_ids[-1] in llm.tokenizer.eos_token_ids
    alone = [llm.generate("The fleet", params[i])[0] for i in range(len(forms))]
    assert tokens(results) == tokens(alone)


def test_a_form_of_any_object(llm: LLM) -> None:
    results = llm.generate(PROMPTS, [drawn(StructuredOutputs(json_object=True), seed) for seed in range(4)])
    assert all(text(result).startswith("{") for result in results)


def test_greedy_keeps_to_the_form_and_padding_is_never_drawn(llm: LLM) -> None:
    results = llm.generate(PROMPTS, drawn(CODE, temperature=0.0))
    assert all(re.fullmatch("[a-f]{4}-[0-9]{3}", text(result)) for result in results)
    assert llm.tokenizer is not None
    every = drawn(StructuredOutputs(regex="(.|\n){1,60}"), temperature=2.0, max_tokens=60)
    for result in llm.generate(PROMPTS, every):
        assert max(result.outputs[0].token_ids) < llm.tokenizer.vocab_size
        assert not set(result.outputs[0].token_ids[:-1]) & llm.tokenizer.special_ids


def test_several_answers_and_a_prefix_that_is_cached(llm: LLM) -> None:
    prompt = "The gateway reads the name of the model and finds the worker that serves it; " * 3
    first = llm.generate(prompt, drawn(CODE, seed=3, n=3))[0]
    again = llm.generate(prompt, drawn(CODE, seed=3, n=3))[0]
    assert again.cached_tokens > 0
    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in again.outputs]
    assert len({answer.text for answer in first.outputs}) == 3


def test_preemption_changes_nothing(llm: LLM, folder: Path) -> None:
    params = [drawn(LONG, seed) for seed in range(4)]
    expected = llm.generate(PROMPTS, params)
    assert all(re.fullmatch("([a-z]{5} ){6}", text(result)) for result in expected)
    options = {**OPTIONS, "max_model_len": 112, "num_gpu_blocks_override": 8, "enable_prefix_caching": False}
    with LLM(str(folder), **options) as small:
        results = small.generate(PROMPTS, params)
        assert small.stats.preemptions > 0
        assert small.check_integrity() == ""
    assert tokens(results) == tokens(expected)


def test_steps_in_flight_change_nothing(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the next step's model runs before this step's tokens are read; the device has them."""
    params = [drawn(LONG if seed % 2 else None, seed, max_tokens=20 + seed) for seed in range(6)]
    prompts = [*PROMPTS, *PROMPTS[:2]]
    expected = llm.generate(prompts, params)
    with LLM(str(folder), **OPTIONS) as overlapped:
        engine = overlapped._engine
        runner = engine.runner
        monkeypatch.setattr(engine, "_depth", 2)
        sample = runner.sample

        def sample_and_keep(launched: Any, form: Any = None) -> None:
            with torch.inference_mode():
                sample(launched, form)
                if launched.sampled is not None:
                    rows = torch.from_numpy(launched.host.rows[launched.host.sample_rows])
                    runner._state.last_tokens[rows] = launched.sampled.tokens

        monkeypatch.setattr(runner, "sample", sample_and_keep)
        results = overlapped.generate(prompts, params)
        assert overlapped.check_integrity() == ""
    assert tokens(results) == tokens(expected)


def test_what_ends_an_answer(llm: LLM) -> None:
    assert llm.tokenizer is not None
    loose = StructuredOutputs(regex="[a-z]{1,40}")
    cases = {
        "cut": drawn(LONG, max_tokens=5),
        "stop string": drawn(StructuredOutputs(regex="[a-c]{5}x[a-c]{5}"), stop="x"),
        "as long as it may": drawn(CODE, min_tokens=50),
        "min_tokens": drawn(loose, min_tokens=6, logit_bias=dict.fromkeys(llm.tokenizer.eos_token_ids, 50)),
        "ignore_eos": drawn(loose, ignore_eos=True),
        "stop token": drawn(
            StructuredOutputs(regex="(ab){40}"), stop_token_ids=llm.tokenizer.encode("b"), max_tokens=90
        ),
    }
    found = dict(zip(cases, llm.generate(["The fleet"] * len(cases), list(cases.values()))))
    assert {name: reason(result) for name, result in found.items()} == {
        "cut": "length", "stop string": "stop", "as long as it may": "stop", "min_tokens": "stop",
        "ignore_eos": "stop", "stop token": "stop",
    }  # fmt: skip
    assert len(found["cut"].outputs[0].token_ids) == 5
    assert re.fullmatch("[a-c]{5}", text(found["stop string"]))
    assert re.fullmatch("[a-f]{4}-[0-9]{3}", text(found["as long as it may"]))
    assert (
        len(found["min_tokens"].outputs[0].token_ids) == 7
    )  # the end is the likeliest as soon as it may come
    assert len(text(found["ignore_eos"])) == 40
    assert text(found["stop token"]) in ("", "a")


def test_bias_penalties_and_forms_together(llm: LLM) -> None:
    params = drawn(CODE, repetition_penalty=1.3, logit_bias={5: -100.0, 399: 100.0}, min_p=0.01, top_p=0.9)
    assert re.fullmatch("[a-f]{4}-[0-9]{3}", text(llm.generate("The fleet", params)[0]))


def outputs_of(llm: LLM, requests: Sequence[EngineRequest], count: int) -> dict[str, RequestOutput]:
    """The last outputs of so many of the requests."""
    last: dict[str, RequestOutput] = {}
    for request in requests:
        assert llm._engine.add(request) is None
    give_up = time.monotonic() + DEADLINE
    while len(last) < count:
        assert time.monotonic() < give_up
        for output in llm._engine.step():
            if output.finish_reason is not None:
                last[output.request_id] = output
    return last


def test_a_form_that_compiles_holds_nobody_up_and_can_be_aborted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def compile_slowly(tokenizer: Any, form: StructuredOutputs) -> Any:
        assert go_on.wait(DEADLINE)
        return compile_matcher(tokenizer, form)

    monkeypatch.setattr(grammars, "compile_matcher", compile_slowly)
    form = StructuredOutputs(regex="slow[0-9]{2}")
    slow = [EngineRequest(f"slow{i}", [5, 6], drawn(form, max_tokens=30), seed=i) for i in range(2)]
    quick = EngineRequest("quick", [5, 6, 7], drawn(None, max_tokens=3, ignore_eos=True), seed=0)
    try:
        assert set(outputs_of(llm, [*slow, quick], 1)) == {"quick"}
        aborted = llm._engine.abort("slow0")
        assert aborted is not None
        assert aborted.finish_reason == "abort"
        assert llm._engine.abort("slow0") is None  # known no more
        assert llm._engine.has_work
        go_on.set()
        last = outputs_of(llm, [], 1)
    finally:
        go_on.set()
    assert last["slow1"].finish_reason == "stop"
    assert not llm._engine.has_work
    assert llm.check_integrity() == ""


def test_a_form_that_does_not_compile_fails_its_request_alone(llm: LLM) -> None:
    """The server refuses such a form before; an engine must not rely on that."""
    bad = EngineRequest("bad", [5, 6], drawn(StructuredOutputs(regex="(a")), seed=0)
    good = EngineRequest("good", [5, 6], drawn(CODE), seed=0)
    last = outputs_of(llm, [bad, good], 2)
    assert last["good"].finish_reason == "stop"
    assert (last["bad"].finish_reason, last["bad"].refused) == ("error", True)
    assert last["bad"].error is not None
    assert "unclosed group" in last["bad"].error
    compiled = len(llm._engine._grammars._known)
    assert outputs_of(llm, [bad], 1)["bad"] == last["bad"]
    assert len(llm._engine._grammars._known) == compiled


def test_an_error_of_the_compiler_is_an_error_of_the_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tokenizer: Any, form: StructuredOutputs) -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr(grammars, "compile_matcher", fail)
    request = EngineRequest("r", [5, 6], drawn(StructuredOutputs(regex="never seen")), seed=0)
    assert outputs_of(llm, [request], 1)["r"].error == "structured output: it can't be compiled: OSError"


def test_a_form_that_is_too_slow_to_follow_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is too slow by this measure: the first that is noticed makes the next look at each."""
    monkeypatch.setattr(constraint, "SLOW_STEP", 0.0)
    plain = EngineRequest("plain", [5, 6], drawn(None, max_tokens=6, ignore_eos=True), seed=0)
    slow = EngineRequest("slow", [5, 6], drawn(LONG), seed=0)
    last = outputs_of(llm, [plain, slow], 2)
    assert last["plain"].finish_reason == "length"
    assert last["slow"].finish_reason == "error"
    assert last["slow"].error is not None
    assert "takes too long" in last["slow"].error
    assert llm.check_integrity() == ""


def test_a_form_that_many_follow_is_compiled_again_and_gives_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one matcher wait for each other."""
    form = StructuredOutputs(regex="[a-z]{1,30}(, [a-z]{1,30}){3}[.]")
    params = [drawn(form, seed=i) for i in range(14)]
    alone = [text(llm.generate("The fleet", one)[0]) for one in params]
    compiled = llm._engine._grammars
    assert len(compiled._known[form].originals) == 1
    monkeypatch.setattr(compiled, "_mask_threads", 3)
    monkeypatch.setattr(compiled, "_writer", None)
    moved, move = [], Constraint.move

    def moving(constraint: Constraint, original: Original, most: int) -> None:
        move(constraint, original, most)
        moved.append(constraint.original is original)

    monkeypatch.setattr(Constraint, "move", moving)
    assert [text(result) for result in llm.generate(["The fleet"] * 14, params)] == alone
    assert len(compiled._known[form].originals) == 3
    assert sum(moved) >= 4, "answers under way are shared out"
    assert not compiled.compiling
    assert not any(map(len, compiled._known[form].originals)), "answers that ended are forgotten"


def test_compiled_forms_are_kept_up_to_a_size(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written, what compiling took and what was followed counts; the last used are kept."""
    known = llm._engine._grammars._known
    known.clear()
    forms = [StructuredOutputs(regex=f"a{{{i}}}") for i in range(1, 6)]
    llm.generate(["The fleet"] * 5, [drawn(form) for form in forms])
    sizes = [known[form].nbytes for form in forms]
    assert all(grammars._BASE_BYTES < size < 64 << 20 for size in sizes)
    llm.generate("The fleet", drawn(forms[4]))
    assert known[forms[4]].nbytes - sizes[4] == 5 * grammars._BYTES_PER_TOKEN
    long = StructuredOutputs(choice=["x" * 4000, "y" * 4000])
    assert grammars._Compiled(long, None, "", 0.0).nbytes > 8000 * grammars._BYTES_PER_CHARACTER

    room = known[forms[4]].nbytes + (16 << 20)
    monkeypatch.setattr(grammars, "_REMEMBERED_BYTES", room)
    for form in forms[:4]:
        known[form].originals[0].tokens += 10_000  # near the limit of its states
    llm.generate("The fleet", drawn(StructuredOutputs(regex="b")))
    assert list(known) == [forms[4], StructuredOutputs(regex="b")]
    monkeypatch.setattr(grammars, "_REMEMBERED_BYTES", 0)
    llm.generate("The fleet", drawn(StructuredOutputs(regex="c")))
    assert not known
    assert [len(text(r)) for r in llm.generate(["The fleet"] * 5, [drawn(form) for form in forms])] == [
        *range(1, 6)
    ]


def test_without_a_tokenizer_there_are_no_forms(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with (
        LLM(f"random:{tmp_path / 'config.json'}", **OPTIONS) as llm,
        pytest.raises(ValueError, match="no tokenizer"),
    ):
        llm.generate([[1, 2]], drawn(CODE))


def test_a_closed_engine_leaves_no_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    with LLM(str(folder), **OPTIONS) as llm:
        llm.generate(PROMPTS, drawn(CODE))
        started = set(threading.enumerate()) - before
        assert started
    give_up = time.monotonic() + DEADLINE
    while any(thread.is_alive() for thread in started):
        assert time.monotonic() < give_up
        gc.collect()
        time.sleep(0.05)
