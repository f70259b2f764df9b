"""docs/migrating-from-vllm.md against the code: every flag of its table does what the page says."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from contracts.options import WorkerOptions
from tests.conftest import ROOT
from tests.test_docs import PAGES, code_blocks, spans, tables
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams, StructuredOutputs, spellings
from worker.config import ConfigError, WorkerConfig, read_config
from worker.server.metrics import Metrics
from worker.server.state import ServerState
from worker.vllm_python import ARGUMENTS, ATTRIBUTES, PARAMETERS, check_arguments

PAGE = ROOT / "docs" / "migrating-from-vllm.md"
((_, _, FLAGS),) = [table for table in tables(PAGE) if table[1][0] == "vLLM's flag"]
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = [
    (page, number)
    for page in PAGES
    for number, block in enumerate(code_blocks(page, "python"))
    if "from worker import" in block
]


def words_of(row: list[str]) -> list[str]:
    (line,) = spans(row[0])
    return shlex.split(line)


def problems(*words: str) -> list[str]:
    try:
        read_config(words)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: row[0].strip("`"))
def test_a_flag(row: list[str]) -> None:
    words, (how, note) = words_of(row), row[1:]
    name = words[0].removeprefix("--")
    model = [] if words[0] in ("MODEL", "--model") else ["m"]
    if how == "the same":
        assert problems(*model, *words) == []
        assert name == "MODEL" or name.replace("-", "_") in WorkerConfig.model_fields
    elif how == "only so":
        assert (name, words[1]) == (name, spellings.ONLY[name])
        assert read_config([*model, *words]) == read_config(model)
        assert [p.split(":")[0] for p in problems(*model, words[0], "other")] == [words[0]]
        for short in (word for word in spans(note) if word.startswith("-")):
            assert read_config([*model, short, words[1]]) == read_config(model)
    elif how == "no effect":
        assert read_config([*model, *words]) == read_config(model)
        for short in spans(note):
            value = [] if short[-1].isdigit() else ["3"]  # -O3
            assert read_config([*model, short, *value]) == read_config(model)
    else:
        assert how == "refused"
        (problem,) = problems(*model, *words)
        assert problem.startswith(f"{words[0]}: ")
        for named in re.findall(r"--[a-z-]+", problem.removeprefix(words[0])):
            assert f"`{named}`" in note, problem
            assert named.removeprefix("--").replace("-", "_") in WorkerConfig.model_fields
        assert set(spans(note)) <= set(re.findall(r"[\w.-]+|`([^`]+)`", problem)) | set(
            problem.split("`")
        ) | {word.strip(":,();.") for word in problem.split()}


def test_every_flag_that_is_known_is_on_the_page() -> None:
    documented = [words_of(row)[0].removeprefix("--") for row in FLAGS]
    assert len(documented) == len(set(documented))
    known = {*spellings.ONLY, *spellings.NO_EFFECT, *spellings.NO_EFFECT_WITH_VALUE, *spellings.REFUSED}
    assert known <= set(documented)


def test_a_mistake_ends_the_program_with_one_line_and_code_2() -> None:
    from worker.config import read_config_or_exit

    shown = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(shown):
        read_config_or_exit(["org/name", "--max-seq-len", "4096", "--swap-space", "4"])
    assert ended.value.code == 2
    assert shown.getvalue() == "worker: --max-seq-len: is now --max-model-len\n"


def test_metrics_exist() -> None:
    ((_, _, rows),) = [table for table in tables(PAGE) if table[1][0] == "vLLM's metric"]
    registry: CollectorRegistry = Metrics(ServerState(WorkerConfig.model_validate({"model": "m"}))).registry
    names = {m.name + ("_total" if m.type == "counter" else "") for m in registry.collect()}
    for row in rows:
        assert spans(row[1])[0] in names
        assert all(name.startswith("vllm:") for name in spans(row[0]))


@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=lambda value: getattr(value, "name", str(value)))
def test_examples_in_python_run(
    page: Path, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small random model in place of the real one."""
    write_checkpoint(tmp_path, "llama", SMALL, write_byte_bpe(tmp_path))
    code = code_blocks(page, "python")[number]
    assert MODEL in code
    script = tmp_path / "example.py"
    script.write_text(code.replace(MODEL, str(tmp_path)))
    runpy.run_path(str(script))
    assert len(capsys.readouterr().out.splitlines()) >= 1


def test_options_in_python_are_told_the_same() -> None:
    given = {"max_num_seqs": 4, "tensor_parallel_size": 1, "trust_remote_code": False}
    taken = spellings.options_of({**given, "swap_space": 4, "task": "generate"})
    assert taken == WorkerOptions.model_validate({"max_num_seqs": 4})
    for name, value, told in (
        ("trust_remote_code", True, "code that comes with a model is never run"),
        ("tensor_parallel_size", 2, "only 1 is accepted"),
        ("quantization", "awq", "AWQ, GPTQ and FP8"),
        ("task", "embed", "--runner pooling"),
        ("max_seq_len", 4096, "is now --max-model-len"),
        ("max_modl_len", 4096, "^max_modl_len: no such option; did you mean 'max_model_len'\\?$"),
        ("max_model_len", "8q", "^max_model_len: must be a whole number, not '8q'$"),
        ("gpu_memory", "much", "^gpu_memory: 'much' is no size; write a number with B, kB"),
    ):
        with pytest.raises(ValueError, match=told):
            spellings.options_of({**given, name: value})
    with pytest.raises(ValueError, match=r"only 1 is accepted.*; xyzzy: no such option$"):
        spellings.options_of({"tensor_parallel_size": 2, "xyzzy": 1})


def test_parameters_that_are_not_there_are_taken_where_they_change_nothing_and_else_told() -> None:
    neutral = {name: elsewhere.neutral or (None, False, []) for name, elsewhere in PARAMETERS.items()}
    for name, values in neutral.items():
        for value in values:
            assert SamplingParams(n=2, best_of=2, logit_bias=None, **{name: value}) == SamplingParams(n=2)
        with pytest.raises(ValueError, match=re.escape(f"{name}: {PARAMETERS[name].told}")):
            SamplingParams(**{name: "another"})
    with pytest.raises(ValueError, match="best_of: only n"):
        SamplingParams(best_of=2)
    with pytest.raises(TypeError, match=r"no parameter 'temprature'; did you mean 'temperature'\?"):
        SamplingParams(temprature=1.0)
    with pytest.raises(ValueError, match="temperature must be from 0 to 2"):
        SamplingParams(best_of=1, temperature=3.0)


def test_arguments_that_are_not_there_are_taken_where_they_change_nothing_and_else_told() -> None:
    unloaded = LLM.__new__(LLM)
    calls: list[Any] = [unloaded.generate, unloaded.chat, unloaded.embed]
    for call, (name, elsewhere) in itertools.product(calls, ARGUMENTS.items()):
        with pytest.raises(ValueError, match=re.escape(f"{name}: {elsewhere.told}")):
            call([], **{name: "another"})
    for call in calls:
        with pytest.raises(TypeError, match=r"has no argument 'use_tqmd'; did you mean 'use_tqdm'\?"):
            call([], use_tqmd=True)
    check_arguments(unloaded.generate, {"lora_request": None, "chat_template_content_format": "auto"})


def test_methods_that_are_not_there_are_told() -> None:
    unloaded = LLM.__new__(LLM)
    for name, told in ATTRIBUTES.items():
        with pytest.raises(AttributeError, match=re.escape(f"LLM has no {name!r}: {told}")):
            getattr(unloaded, name)
    assert not hasattr(unloaded, "xyzzy")


def test_a_form_may_be_given_as_vllm_has_it() -> None:
    given = SamplingParams(structured_outputs={"choice": ["yes", "no"]})  # type: ignore[arg-type]
    assert given.structured_outputs == StructuredOutputs(choice=("yes", "no"))
    with pytest.raises(ValueError, match=r"has no 'choices'; it has json, regex, choice"):
        SamplingParams(structured_outputs={"choices": ["yes"]})  # type: ignore[arg-type]
