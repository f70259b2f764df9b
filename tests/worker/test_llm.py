"""LLM, the engine in the caller's process, with a small random model: prompts, errors, ends, memory."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich
import torch
from rich.console import Console

from tests.worker.overlapped import overlap_steps
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams, loading_bar
from worker.engine.loop import Engine
from worker.engine.scheduler import Scheduler
from worker.interrupts import interrupts_held
from worker.ipc.messages import EngineRequest, Progress
from worker.params import StructuredOutputs
from worker.runner.sampler import Sampled, Sampler
from worker.runner.step import Runner

OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_memory_bytes": "8MiB", "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "Which fleet?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama", SMALL, write_byte_bpe(directory))
    return str(directory)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as llm:
        yield llm


def test_all_spellings_of_a_prompt_are_the_same(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("The gateway")
    spellings: list[Any] = ["The gateway", ids, {"prompt": "The gateway"}, {"prompt_token_ids": ids}]
    together = llm.generate(spellings, GREEDY)
    alone = [llm.generate(spelling, GREEDY) for spelling in spellings]
    texts = {result.outputs[0].text for result in [*together, *(one for (one,) in alone)]}
    assert len(texts) == 1
    assert [result.prompt for result in together] == ["The gateway", None, "The gateway", None]
    assert all(result.finished and result.prompt_token_ids == ids for result in together)
    assert len({result.request_id for result in together}) == 4


def test_who_says_to_be_another_answer_to_a_prompt_reads_only_pages_of_its_own(llm: LLM) -> None:
    engine, prompts = llm._engine, [[number] * 40 for number in (5, 6)]
    expected = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]
    assert expected[0] != expected[1]
    assert engine.call("reset_prefix_cache") == ""
    found: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for name, prompt in zip(found, [*prompts, prompts[1]]):
        assert engine.add(EngineRequest(name, prompt, GREEDY, 1, sibling=name != "a")) is None
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] += output.token_ids
    assert list(found.values()) == [*expected, expected[1]]


def test_masks_that_leave_nothing_are_the_requests_own_fault(llm: LLM) -> None:
    digits = StructuredOutputs(regex="[0-9]{4}")
    params = SamplingParams(allowed_token_ids=(7, 8), structured_outputs=digits, max_tokens=8)
    with pytest.raises(ValueError, match="what it forbids leave none"):
        llm.generate([[5, 6]], params)
    assert llm.generate([[5, 6]], GREEDY)[0].finished
    assert llm.check_integrity() == ""


def test_hundreds_of_prompts_with_parameters_of_their_own(llm: LLM) -> None:
    """Far more than run at a time (8): each gets what it would get alone."""
    params = [SamplingParams(seed=i, max_tokens=1 + i % 5, ignore_eos=True) for i in range(300)]
    prompts = [[1 + i % 300, 2 + i % 50] for i in range(300)]
    results = llm.generate(prompts, params)
    assert [len(result.outputs[0].token_ids) for result in results] == [1 + i % 5 for i in range(300)]
    for i in (0, 7, 123, 299):
        assert llm.generate(prompts[i], params[i])[0].outputs == results[i].outputs
    assert llm.check_integrity() == ""


def test_an_answer_tells_how_likely_it_was(llm: LLM) -> None:
    (result,) = llm.generate([5], SamplingParams(n=2, logprobs=0, max_tokens=3, ignore_eos=True))
    for answer in result.outputs:
        assert answer.logprobs is not None
        assert answer.cumulative_logprob == sum(entry.logprob for entry in answer.logprobs) < 0.0
    assert llm.generate([5], GREEDY)[0].outputs[0].cumulative_logprob is None


def test_several_answers_and_stops(llm: LLM) -> None:
    free = llm.generate("worker", SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True))[0]
    assert [output.index for output in free.outputs] == [0, 1, 2]
    assert len({output.text for output in free.outputs}) == 3
    first = free.outputs[0]
    stop = first.text[4:6]
    assert stop
    stopped = llm.generate("worker", SamplingParams(seed=5, max_tokens=12, ignore_eos=True, stop=stop))[0]
    (output,) = stopped.outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert first.text.startswith(output.text)
    assert stop not in output.text
    assert len(output.token_ids) < len(first.token_ids)
    end = first.token_ids[3]
    by_token = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, stop_token_ids=[end])
    (output,) = llm.generate("worker", by_token)[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", end)
    assert output.token_ids == first.token_ids[: first.token_ids.index(end) + 1]
    assert llm.check_integrity() == ""


def test_answers_to_a_prompt_find_it_cached(llm: LLM) -> None:
    """More than run at a time; each gives what it gives alone, and the prompt is computed once."""
    prompt = list(range(7, 107))
    llm.reset_prefix_cache()
    (alone,) = llm.generate([prompt], GREEDY)
    llm.reset_prefix_cache()
    before = llm.stats.prefix_hits
    params = SamplingParams(n=20, temperature=0, max_tokens=6, ignore_eos=True)
    (result, other) = llm.generate([prompt, [*prompt[:50], 5]], params)
    assert [one.token_ids for one in result.outputs] == [alone.outputs[0].token_ids] * 20
    assert len({tuple(one.token_ids) for one in other.outputs}) == 1
    assert llm.stats.prefix_hits - before == 19 * 96 + 20 * 48
    assert llm.check_integrity() == ""


def test_chats(llm: LLM, tmp_path: Path, model: str) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    (one,) = llm.chat(CHAT, GREEDY)
    assert one.prompt == "<|im_start|>user\nWhich fleet?<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids == tokenizer.encode(one.prompt, add_special_tokens=False)
    assert [two.outputs for two in llm.chat([CHAT, CHAT], GREEDY)] == [one.outputs] * 2
    (open_ended,) = llm.chat(CHAT, GREEDY, add_generation_prompt=False)
    assert open_ended.prompt == one.prompt.removesuffix("<|im_start|>assistant\n")
    begun = [*CHAT, {"role": "assistant", "content": "The fleet"}]
    (going_on,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert going_on.prompt == f"{one.prompt}The fleet"
    with pytest.raises(ValueError, match="needs add_generation_prompt=False"):
        llm.chat(begun, GREEDY, continue_final_message=True)
    assert llm.chat([], GREEDY) == []
    with pytest.raises(ValueError, match="a conversation is empty"):
        llm.chat([[]], GREEDY)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{{ mood }}{{ tools[0].name if tools }}")
    with LLM(model, **OPTIONS, chat_template=str(template)) as other:
        (own,) = other.chat(CHAT, GREEDY, chat_template_kwargs={"mood": "!"}, tools=[{"name": "f"}])
        assert own.prompt == "Which fleet?!f"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["fine", ""], None, "a prompt is empty"),
        (["fine", [1] * 40_000], None, "max_model_len"),
        ([[1], [100_000]], None, "token ids of a prompt must be from 0 to"),
        ([[1], [-1]], None, "token ids of a prompt"),
        (
            [{"text": "x"}],
            None,
            "has prompt .text. or prompt_token_ids, and this one has text",
        ),
        ([{}], None, "this one has nothing"),
        (["fine", "fine"], [GREEDY], "2 prompts but 1 sampling parameters"),
        (["fine", "fine"], [GREEDY, SamplingParams(logit_bias={9999: 1})], "logit_bias names token 9999"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    steps = llm.stats.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert llm.stats.steps == steps
    assert llm.stats.running == llm.stats.waiting == 0


def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    steps = 0

    def interrupted(engine: Engine) -> list[Any]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, i] for i in range(20)], SamplingParams(max_tokens=500, ignore_eos=True))
    assert llm.stats.running == llm.stats.waiting == 0
    assert llm.check_integrity() == ""
    assert llm.generate([5], GREEDY)[0].finished


def test_ctrl_c_comes_between_steps(llm: LLM) -> None:
    """A signal, at any time: within a step too, where an exception would leave pages that nobody frees."""
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def generate_until_interrupted(delay: float) -> None:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        while True:
            llm.generate([[5, i] for i in range(20)], params)

    for delay in (0.001, 0.003, 0.011, 0.02, 0.031, 0.04, 0.052, 0.06):
        with pytest.raises(KeyboardInterrupt):
            generate_until_interrupted(delay)
        assert llm.stats.running == llm.stats.waiting == 0
        assert llm.check_integrity() == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate([5], GREEDY)[0].finished


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_step_that_fails_costs_its_call_and_nothing_else(
    model: str, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: pages and rows are free, and the next call gives what it would have given."""
    prompts = [[5, i, *range(40)] for i in range(12)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=7, repetition_penalty=1.2)
    places = [(Scheduler, "_schedule_row"), (Scheduler, "update"), (Runner, "forward"), (Sampler, "sample")]

    def fail_once(owner: type, name: str, after: int) -> None:
        whole, calls = getattr(owner, name), itertools.count()

        def failing(*arguments: Any) -> Any:
            if next(calls) == after:
                raise torch.OutOfMemoryError("no memory is left")
            return whole(*arguments)

        monkeypatch.setattr(owner, name, failing)

    with LLM(model, **OPTIONS) as llm:
        if overlapped:
            overlap_steps(llm)
        expected = llm.generate(prompts, params)
        for owner, name in [*places, (Sampled, "read")]:
            for after in (0, 5):
                fail_once(owner, name, after)
                with pytest.raises(torch.OutOfMemoryError):
                    llm.generate(prompts, params)
                assert llm.check_integrity() == ""
                assert llm.stats.running == llm.stats.waiting == 0
            again = llm.generate(prompts, params)
            assert [one.outputs for one in again] == [one.outputs for one in expected]
            assert llm.check_integrity() == ""


def test_after_a_failure_of_the_device_an_llm_says_that_it_is_dead(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA error stays: a context that had one can't be used again. Here it is only called so."""

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with LLM(model, **OPTIONS) as llm:
        monkeypatch.setattr(torch.cuda, "synchronize", broken)
        monkeypatch.setattr(llm._engine.runner, "forward", broken)
        monkeypatch.setattr(llm._engine, "config", replace(llm._engine.config, device=torch.device("cuda")))
        with pytest.raises(RuntimeError, match=r"^CUDA error"):
            llm.generate([5], GREEDY)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no step can run in this process any more: CUDA error"):
                llm.generate([5], GREEDY)


def test_a_second_ctrl_c_is_not_held() -> None:
    def press(times: int) -> None:
        with interrupts_held():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            reached.append(times)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached: list[int] = []
    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            press(times)
    assert reached == [1]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "can't be NoneType"),
        (5, "can't be int"),
        (b"text", "can't be bytes"),
        ([b"text"], "can't be bytes"),
        ([None], "can't be NoneType"),
        ([True, False], "whole numbers"),
        ([[1.5]], "whole numbers"),
    ],
)
def test_what_is_no_prompt_is_told(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(prompts, GREEDY)


def test_prompts_of_other_types_and_parameters_that_are_none(llm: LLM) -> None:
    assert llm.generate(np.array([5, 6]), GREEDY)[0].prompt_token_ids == [5, 6]  # type: ignore[arg-type]
    assert len(llm.generate((text for text in ("a", "b")), GREEDY)) == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogate"):
        llm.generate("\ud800", GREEDY)
    nothing_right: tuple[Any, ...] = ({"max_tokens": 2}, "greedy", [{}])
    for wrong in nothing_right:
        with pytest.raises(TypeError, match="sampling_params must be"):
            llm.generate("a", wrong)
    with pytest.raises(ValueError, match="stop must be a list, not int"):
        SamplingParams(stop=5)  # type: ignore[arg-type]


def test_a_closed_llm_gives_its_memory_back_and_says_that_it_is_closed(model: str) -> None:
    with LLM(model, **OPTIONS) as first:
        engine = weakref.ref(first._engine)
        pool = weakref.ref(first._engine.runner.kv_cache.pool)
        expected = first.generate([5, 6, 7], GREEDY)[0].outputs
    assert engine() is None
    gc.collect()
    assert pool() is None
    for ask in (
        lambda: first.generate([5], GREEDY),
        lambda: first.chat(CHAT),
        lambda: first.embed([5]),
        lambda: first.stats,
    ):
        with pytest.raises(RuntimeError, match="is closed; make another one"):
            ask()
    first.close()
    with LLM(model, **OPTIONS) as second:
        assert second.generate([5, 6, 7], GREEDY)[0].outputs == expected


def test_loading_is_shown_on_a_terminal_only(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LLM(model, **OPTIONS).close()
    assert capsys.readouterr() == ("", "")
    drawn = io.StringIO()
    console = partial(Console, file=drawn, force_terminal=True, width=200)
    monkeypatch.setattr(loading_bar, "Console", lambda stderr: console())
    LLM(model, **OPTIONS).close()
    assert f"{model[:40]}" in drawn.getvalue()
    with pytest.raises(ValueError, match="no such file"), LLM("/no/such/place", **OPTIONS):
        pass
    bar = loading_bar.LoadingBar("m")
    with bar:
        bar.downloading(1, 0)
        bar.downloading(5, 10)
        bar.show(Progress("weights", 30, 40))
        bar._bars.refresh()
    text = drawn.getvalue()
    assert "m: reading weights" in text
    assert "75%" in text
    assert text.rstrip().endswith("\x1b[2K")  # the line is gone


def test_a_bar_is_drawn_only_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    rich.reconfigure(force_terminal=True)
    try:
        llm.generate([5], GREEDY)
        assert capsys.readouterr().out == ""
        llm.generate([5], GREEDY, progress=True)
        assert "1/1 answers" in capsys.readouterr().out
    finally:
        rich.reconfigure()


def test_options_are_the_workers(model: str) -> None:
    with pytest.raises(ValueError, match="no_such_option"):
        LLM(model, no_such_option=1)
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(model, max_num_seqs=0)
