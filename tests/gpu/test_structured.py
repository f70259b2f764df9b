"""Forms of answers on the card: the mask's kernel, and steps that overlap while matchers need every token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from bench.grammar_cost import RECORD
from kernels.token_mask import _mask_kernel, mask_tokens
from worker import LLM, SamplingParams, StructuredOutputs
from worker.runner.form_masks import FormMasks, compile_form_masks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
CODE = "[a-f]{4}-[0-9]{3}(, [a-f]{4}-[0-9]{3}){2}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [31, 4096, 50_257, 152_064])
def test_masks_are_those_of_a_cpu(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, vocab).to(dtype)
    places = torch.tensor([8, 0, 3, 5], dtype=torch.int32)
    mask = torch.randint(-(2**31), 2**31 - 1, (4, -(-vocab // 32)), dtype=torch.int32)
    on_card = logits.cuda()
    mask_tokens(on_card, mask.cuda(), places.cuda())
    mask_tokens(logits, mask, places)
    assert torch.equal(on_card.cpu(), logits)


@pytest.mark.parametrize("vocab", [31, 50_257, 152_064])
def test_masks_of_steps_that_nobody_waits_for(vocab: int) -> None:
    """Steps of other numbers of rows: the next one's masks are written while the device is busy, but not
    before it has read the last ones; and what they launch was compiled before."""
    torch.manual_seed(0)
    words = -(-vocab // 32)
    logits = torch.randn(16, vocab, dtype=torch.bfloat16)
    on_card, work = logits.cuda(), torch.randn(4096, 4096, device="cuda")
    compile_form_masks(on_card[:1].clone())
    variants = len(_mask_kernel.device_caches[torch.cuda.current_device()][0])
    masks = FormMasks(16, torch.device("cuda"))
    found, expected = [], []
    for step in range(24):
        places = torch.randperm(16)[: 1 + step % 16]
        bits = torch.randint(-(2**31), 2**31 - 1, (len(places), words), dtype=torch.int32)
        expected.append(logits.clone())
        mask_tokens(expected[-1], bits, places.int())
        masked = on_card.clone()
        for _ in range(20):
            work = torch.tanh(work @ work)
        form = masks.begin(places.tolist(), words)
        form.bits[:] = bits.numpy().view(np.uint32)
        form.apply(masked)
        found.append(masked)
    assert all(torch.equal(one.cpu(), want) for one, want in zip(found, expected))
    assert len(_mask_kernel.device_caches[torch.cuda.current_device()][0]) == variants


def answers(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    chats = [[{"role": "user", "content": f"Write a code, number {i}."}] for i in range(len(params))]
    results = llm.chat(chats, params)
    assert llm.check_integrity() == ""
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.model
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_the_cpu_s(demo_model: Path, enforce_eager: bool) -> None:
    """Greedy, float32, in one batch with answers without a form; those that end leave others going on."""
    forms = [
        StructuredOutputs(regex=CODE),
        None,
        StructuredOutputs(choice=("one", "two", "three")),
        StructuredOutputs(json=RECORD),
        None,
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=160, min_tokens=i, structured_outputs=form)
        for i, form in enumerate(forms)
    ]
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "256MiB", "max_num_seqs": 16}
    with LLM(str(demo_model), device="cpu", **options) as llm:
        expected = answers(llm, params)
    with LLM(str(demo_model), device="cuda", enforce_eager=enforce_eager, **options) as llm:
        for _ in range(2):
            assert answers(llm, params) == expected


@pytest.mark.model
def test_documents_at_temperature_1_are_valid(demo_model: Path) -> None:
    form = StructuredOutputs(json=RECORD)
    params = [SamplingParams(seed=i, max_tokens=900, structured_outputs=form) for i in range(64)]
    params += [SamplingParams(seed=i, max_tokens=50, ignore_eos=True) for i in range(16)]
    with LLM(str(demo_model), device="cuda", kv_cache_memory_bytes="2GiB", max_num_seqs=128) as llm:
        prompt = [{"role": "user", "content": "Make up a ticket as JSON."}]
        results = [result.outputs[0] for result in llm.chat([prompt] * len(params), params)]
        assert llm.check_integrity() == ""
    for result in results[:64]:
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), RECORD)
    assert {len(result.token_ids) for result in results[64:]} == {50}
