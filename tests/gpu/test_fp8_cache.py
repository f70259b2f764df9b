"""A KV cache in FP8 on the card: kernels as compiled against their references, and engines that use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels.attention import paged_attention, paged_attention_reference, rope_and_attention
from kernels.cache_types import FP8, FP8_MAX
from kernels.copy_pages import copy_pages, copy_pages_reference
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference
from tests.gpu.test_engine import CONFIG, on_cpu, on_gpu, tokens
from tests.gpu.test_kernels import DEVICE, DTYPES, HEADS, _poisoned_memory
from tests.kernels.cases import Paged, assert_close, cos_sin, fused_qkv, paged_case, qk_norm_weights
from worker import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # the first run compiles every variant
__all__ = ["_poisoned_memory"]
every_model = pytest.mark.parametrize("model", HEADS)


def case_of(
    model: str,
    lengths: list[int],
    queries: list[int],
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
) -> Paged:
    q_heads, kv_heads, dim = HEADS[model]
    return paged_case(
        lengths, queries, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, page_size=page_size, dtype=dtype,
        cache_dtype=FP8, device=DEVICE,
    )  # fmt: skip


def check_attention(case: Paged, window: int = 0) -> None:
    """As near to the reference as with a cache of the queries' own type."""
    scale = case.q.shape[2] ** -0.5
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale, window)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, scale, window)
    assert out.dtype == case.q.dtype
    assert_close(out, expected)


def same_bytes(cache: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of them, NaN of either sign being the same; none is off by more than a step."""
    torch.testing.assert_close(cache.float(), expected.float(), atol=2**-9, rtol=2**-3, equal_nan=True)
    same = cache.view(torch.uint8) == expected.view(torch.uint8)
    same |= cache.float().isnan() & expected.float().isnan()
    return int(same.sum()) / same.numel()  # not mean(): a card's is off by a rounding


@pytest.mark.parametrize("dtype", DTYPES)
@every_model
def test_decode(model: str, dtype: torch.dtype) -> None:
    check_attention(case_of(model, [4096, 1, 17, 700, 64, 0, 1023, 2048], [1] * 8, dtype))


@pytest.mark.parametrize("sequences", [1, 7, 32, 256])
@pytest.mark.parametrize("window", [0, 100])
def test_decode_of_few_and_many_sequences(sequences: int, window: int) -> None:
    lengths = [(i * 37) % 600 + 1 for i in range(sequences - 1)] + [9000]
    check_attention(case_of("qwen2-7b", lengths, [1] * sequences), window)


@pytest.mark.parametrize("page_size", [8, 32, 64, 128])
def test_other_pages(page_size: int) -> None:
    check_attention(case_of("qwen2-7b", [700, 3, 129, 90], [1, 1, 1, 40], page_size=page_size))


@pytest.mark.parametrize("dtype", DTYPES)
@every_model
@pytest.mark.parametrize("window", [0, 100])
def test_prefill(model: str, dtype: torch.dtype, window: int) -> None:
    """Read from pages, and gathered for long prompts; behind two decodes."""
    check_attention(case_of(model, [90, 5, 200, 513, 64], [1, 1, 100, 3, 64], dtype), window)
    check_attention(case_of(model, [90, 5, 1100, 300], [1, 1, 700, 300], dtype), window)


def test_small_chunks_of_long_contexts() -> None:
    """Several programs share the keys of a tile."""
    check_attention(case_of("qwen2-7b", [700, 3, 30_000, 500, 9_001], [1, 1, 40, 7, 33]))


@pytest.mark.parametrize("dtype", DTYPES)
@every_model
@pytest.mark.parametrize("sequences", [1, 7, 100])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_decode(model: str, sequences: int, dtype: torch.dtype, normed: bool) -> None:
    """One kernel for all: it sees a token's own key and value as it writes them."""
    q_heads, kv_heads, dim = HEADS[model]
    lengths = [(i * 97) % 700 + 1 for i in range(sequences - 1)] + [2049]
    case = case_of(model, lengths, [1] * sequences, dtype)
    q, k, v = fused_qkv(sequences, q_heads, kv_heads, dim, dtype, DEVICE)
    v[-1] *= 1000
    norm = qk_norm_weights(dim, dtype, DEVICE) if normed else None
    table = cos_sin(2049, dim, DEVICE)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache, norm)
    scale = dim**-0.5
    out = rope_and_attention(q, k, v, table, case.batch, case.k_cache, case.v_cache, scale, 0, norm)
    assert same_bytes(case.k_cache, k_cache) > 0.99
    assert same_bytes(case.v_cache, v_cache) == 1
    assert_close(out, paged_attention_reference(rotated, case.k_cache, case.v_cache, case.batch, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 700])
def test_what_is_too_large_becomes_the_largest(tokens: int, dtype: torch.dtype) -> None:
    q, k, v = fused_qkv(tokens, 28, 4, 128, dtype, DEVICE)
    k[0] *= 1000
    v[0, 0, :5] = torch.tensor([500.0, -1e4, torch.inf, -torch.inf, torch.nan])
    case = paged_case(
        [tokens], [tokens], q_heads=28, kv_heads=4, head_dim=128, page_size=16, dtype=dtype, cache_dtype=FP8,
        device=DEVICE, written=False,
    )  # fmt: skip
    table = cos_sin(tokens, 128, DEVICE)
    right = case.k_cache.clone(), case.v_cache.clone()
    rope_and_cache_reference(q.clone(), k, v, table, case.batch, *right)
    rope_and_cache(q, k, v, table, case.batch, case.k_cache, case.v_cache)
    assert same_bytes(case.k_cache, right[0]) > 0.99
    assert same_bytes(case.v_cache, right[1]) == 1
    page, slot = divmod(int(case.batch.slots[0]), 16)
    assert case.k_cache[page, :, slot].float().abs().max() == FP8_MAX
    first = case.v_cache[page, 0, slot].float()
    assert first[:4].tolist() == [448, -448, 448, -448]
    assert first[4].isnan()


def test_a_key_computed_again_is_the_same_to_the_bit() -> None:
    """By the kernel of prompts and by that of decodes."""
    case = case_of("qwen2-7b", [500, 3, 77], [1] * 3)
    q, k, v = fused_qkv(3, 28, 4, 128, torch.bfloat16, DEVICE)
    table, other = cos_sin(500, 128, DEVICE), (case.k_cache.clone(), case.v_cache.clone())
    rope_and_cache(q.clone(), k, v, table, case.batch, *other)
    rope_and_attention(q.clone(), k, v, table, case.batch, case.k_cache, case.v_cache, 0.1)
    assert same_bytes(case.k_cache, other[0]) == 1
    assert same_bytes(case.v_cache, other[1]) == 1


def test_copied_pages_are_the_same_bytes() -> None:
    src = torch.randint(256, (4, 2, 50, 4, 16, 128), dtype=torch.uint8, device=DEVICE).view(FP8)
    dst = torch.zeros(4, 2, 30, 4, 16, 128, dtype=torch.uint8, device=DEVICE).view(FP8)
    expected = dst.clone()
    pairs = torch.tensor([[49, 1], [7, 29], [0, 4]], device=DEVICE)
    copy_pages_reference(src, expected, pairs)
    copy_pages(src, dst, pairs)
    assert torch.equal(dst.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"random:{path}"


def same(left: list[list[int]], right: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)


def test_graphs_equal_eager(source: str) -> None:
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    with on_cpu(source) as cpu:
        with on_gpu(cpu, source, enforce_eager=True, **options) as eager:
            assert eager.info.kv_cache_dtype == "float8_e4m3fn"
            want = tokens(eager)
        with on_gpu(cpu, source, **options) as graphs:
            assert same(tokens(graphs), want) >= 0.7  # as with a cache of bfloat16


def test_float32_tokens_are_the_cpu_s(source: str) -> None:
    """By graphs, after preemptions and in chunks; but for a key that falls between two values of FP8."""
    options = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    with on_cpu(source, kv_cache_dtype="fp8") as cpu:
        want = tokens(cpu)
        for more in ({}, {"num_gpu_blocks_override": 48}, {"max_num_batched_tokens": 64}):
            with on_gpu(cpu, source, **options, **more) as llm:
                assert same(tokens(llm), want) >= 0.8
                assert same(tokens(llm), want) >= 0.8
                assert (llm.stats.preemptions > 0) == ("num_gpu_blocks_override" in more)


@pytest.mark.model
def test_the_real_model_says_what_it_says_in_float32(demo_model: Path, reference_tokens: Path) -> None:
    """Behind its own words in float32, each of them is the likeliest in 90 % of places."""
    prompts = json.loads(reference_tokens.read_text())["prompts"]
    texts = [prompt["prompt_ids"] + prompt["greedy_ids"] for prompt in prompts]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "kv_cache_memory_bytes": "512MiB"}
    with LLM(str(demo_model), device="cuda", max_num_seqs=64, **options) as llm:
        results = llm.generate(texts, score)
        scored = [one for r in results for one in (r.prompt_logprobs or [])[-64:] if one]
        assert len(scored) == 64 * len(texts)
        assert sum(one.rank == 1 for one in scored) >= 0.9 * len(scored)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))
        assert "Paris" in answer.outputs[0].text
