"""The kernels as compiled for the card, against their references, at the shapes of real models."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import paged_attention, paged_attention_reference, rope_and_attention
from kernels.attention_decode import decode_attention_triton
from kernels.copy_pages import copy_pages, copy_pages_reference
from kernels.gemm_skinny import Norm
from kernels.linear import linear, linear_add_norm, linear_reference, linear_swiglu
from kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference
from kernels.swiglu import swiglu, swiglu_reference
from tests.kernels.cases import TOLERANCES, Paged, assert_close, cos_sin, fused_qkv, paged_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # the first run compiles every variant
DEVICE = "cuda"
EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS = {  # query heads, KV heads, head size
    "qwen2-7b": (28, 4, 128),
    "llama-3-8b": (32, 8, 128),
    "phi-3-mini": (32, 32, 96),
    "smollm2-135m": (9, 3, 64),
    "phi-2": (32, 32, 80),
    "gemma-2b": (8, 1, 256),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_model = pytest.mark.parametrize("model", HEADS)


def case_of(
    model: str, lengths: list[int], queries: list[int], dtype: torch.dtype, page_size: int = 16
) -> Paged:
    q_heads, kv_heads, dim = HEADS[model]
    return paged_case(
        lengths,
        queries,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=dtype,
        device=DEVICE,
    )


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What torch.empty hands out next is NaN: a result that a kernel forgets to write shows."""
    blocks = [
        torch.full((size,), float("nan"), device=DEVICE) for size in (1 << 24, 1 << 20, 1 << 16, 1 << 10)
    ]
    del blocks


def check_attention(case: Paged, window: int = 0) -> None:
    scale = case.q.shape[2] ** -0.5
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale, window)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, scale, window)
    assert_close(out, expected)


@every_dtype
@every_model
def test_decode(model: str, dtype: torch.dtype) -> None:
    check_attention(case_of(model, [4096, 1, 17, 700, 64, 0, 1023, 2048], [1] * 8, dtype))


@pytest.mark.parametrize("page_size", [8, 24, 64, 128])
def test_decode_with_other_pages(page_size: int) -> None:
    check_attention(case_of("qwen2-7b", [700, 3, 129], [1] * 3, torch.bfloat16, page_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_of_32k_tokens(dtype: torch.dtype) -> None:
    check_attention(case_of("qwen2-7b", [32_768, 5], [1, 1], dtype))


@pytest.mark.parametrize("sequences", [1, 32, 256])
def test_decode_of_many_sequences(sequences: int) -> None:
    """From many splits a sequence to one."""
    lengths = [(i * 37) % 600 + 1 for i in range(sequences)]
    check_attention(case_of("qwen2-7b", lengths, [1] * sequences, torch.bfloat16))


@every_dtype
@every_model
def test_prefill(model: str, dtype: torch.dtype) -> None:
    """Whole prompts, a chunk behind a long context, a few last tokens."""
    check_attention(case_of(model, [300, 1100, 513, 64], [300, 200, 3, 64], dtype))


def test_prefill_of_a_long_prompt() -> None:
    check_attention(case_of("qwen2-7b", [4096], [4096], torch.bfloat16))


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("model", ["qwen2-7b", "smollm2-135m"])
def test_prefill_of_more_tiles_than_multiprocessors(model: str, window: int) -> None:
    """Programs take turns at tiles, of which some have no rows; chunks begin anywhere in a block."""
    case = case_of(model, [3000, 40, 777, 1300, 513], [2900, 40, 300, 1300, 2], torch.bfloat16)
    for _ in range(3):
        check_attention(case, window)


def test_prefill_chunk_at_the_end_of_32k_tokens() -> None:
    check_attention(case_of("qwen2-7b", [32_768], [256], torch.bfloat16))


@every_dtype
@pytest.mark.parametrize("window", [0, 5000])
def test_small_chunks_of_long_contexts(dtype: torch.dtype, window: int) -> None:
    """Several programs share the keys of a tile."""
    lengths, queries = [700, 3, 30_000, 500, 9_001, 2_000], [1, 1, 40, 7, 33, 2]
    check_attention(case_of("qwen2-7b", lengths, queries, dtype), window)


@every_dtype
@every_model
def test_decodes_and_prefills_together(model: str, dtype: torch.dtype) -> None:
    check_attention(case_of(model, [900, 33, 1, 400, 129], [1, 1, 1, 100, 129], dtype))


@every_dtype
@pytest.mark.parametrize("window", [1, 100, 512])
def test_sliding_window(window: int, dtype: torch.dtype) -> None:
    check_attention(case_of("llama-3-8b", [1500, 90, 700, 600], [1, 1, 200, 600], dtype), window)


def test_page_offsets_are_64_bit() -> None:
    """Pages behind element 2**31 of a pool of four gigabytes."""
    case = case_of("llama-3-8b", [600, 40, 200], [1, 1, 100], torch.bfloat16)
    few, *shape = case.k_cache.shape
    pages = 2**31 // case.k_cache[0].numel() + few + 1
    pool = torch.empty(pages, *shape, dtype=torch.bfloat16, device=DEVICE)
    pool[pages - few :] = case.k_cache
    case.v_cache = case.k_cache
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, 0.1)
    case.batch.block_tables += pages - few
    assert_close(paged_attention(case.q, pool, pool, case.batch, 0.1), expected)


def test_one_graph_serves_every_length() -> None:
    """Captured for the longest context; replayed on short ones, long ones and padding rows."""
    longest = 8192
    case = case_of("qwen2-7b", [longest, longest, 0, 0], [1] * 4, torch.bfloat16)
    q, batch = case.q, case.batch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        paged_attention(q, case.k_cache, case.v_cache, batch, 0.1)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = paged_attention(q, case.k_cache, case.v_cache, batch, 0.1)
    torch.cuda.synchronize()
    for lengths in ([1, 5, 0, 0], [longest, 64, 0, 0], [100, 8000, 0, 0], [0, 0, 0, 0]):
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, paged_attention_reference(q, case.k_cache, case.v_cache, batch, 0.1))


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("sequences", [4, 40])
def test_number_of_splits_does_not_matter(sequences: int, splits: int) -> None:
    case = case_of("qwen2-7b", [3000, 3, 64, 0] * (sequences // 4), [1] * sequences, torch.bfloat16)
    out = torch.full_like(case.q, float("nan"))
    for _ in range(2):  # the second time with the counters as the first left them
        decode_attention_triton(
            case.q, case.k_cache, case.v_cache, case.batch, 0.1, 0, out, splits=splits, slots=2 * splits
        )
        assert_close(out, paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, 0.1))


@every_dtype
@every_model
@pytest.mark.parametrize("sequences", [1, 7, 8, 100])
def test_rope_and_decode(model: str, sequences: int, dtype: torch.dtype) -> None:
    """One kernel for rotary embedding, the write into the cache and attention."""
    q_heads, kv_heads, dim = HEADS[model]
    lengths = [(i * 97) % 700 + 1 for i in range(sequences - 1)] + [2049]
    case = case_of(model, lengths, [1] * sequences, dtype)
    q, k, v = fused_qkv(sequences, q_heads, kv_heads, dim, dtype, DEVICE)
    table = cos_sin(2049, 32 if model == "phi-2" else dim, DEVICE)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rotated = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_cache, v_cache)
    expected = paged_attention_reference(rotated, k_cache, v_cache, case.batch, dim**-0.5)
    args = (q, k, v, table, case.batch, case.k_cache, case.v_cache, dim**-0.5)
    assert_close(rope_and_attention(*args), expected)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(case.k_cache, k_cache, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_cache, atol=0, rtol=0, equal_nan=True)


@every_dtype
@every_model
@pytest.mark.parametrize("tokens", [1, 300])
def test_rope_and_cache(model: str, tokens: int, dtype: torch.dtype) -> None:
    q_heads, kv_heads, dim = HEADS[model]
    rot_dim = 32 if model == "phi-2" else dim
    q, k, v = fused_qkv(tokens, q_heads, kv_heads, dim, dtype, DEVICE)
    case = paged_case(
        [tokens + 40],
        [tokens],
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page_size=16,
        dtype=dtype,
        device=DEVICE,
        written=False,
    )
    case.batch.slots[-1] = 3  # the null page
    table = cos_sin(tokens + 40, rot_dim, DEVICE)
    k_expected, v_expected = case.k_cache.clone(), case.v_cache.clone()
    expected = rope_and_cache_reference(q.clone(), k, v, table, case.batch, k_expected, v_expected)
    assert_close(rope_and_cache(q, k, v, table, case.batch, case.k_cache, case.v_cache), expected)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(case.k_cache, k_expected, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(case.v_cache, v_expected, atol=0, rtol=0, equal_nan=True)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 576), (7, 3072), (300, 3584), (2, 8192)])
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=DEVICE).to(dtype)
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    expected = add_rms_norm_reference(x, residual.clone(), weight, EPS)
    normed, updated = add_rms_norm(x, residual, weight, EPS)
    assert_close(normed, expected[0])
    assert torch.equal(updated, expected[1])


@every_dtype
@pytest.mark.parametrize(("tokens", "inner"), [(1, 1536), (5, 18944), (300, 8192), (3, 37)])
def test_swiglu(tokens: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * inner, device=DEVICE).to(dtype)
    gate_up[0, 0] = -200.0
    assert_close(swiglu(gate_up), swiglu_reference(gate_up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize(("columns", "inner"), [(4608, 3584), (3584, 18944), (576, 1536)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, columns: int, inner: int, with_bias: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, inner, device=DEVICE) * inner**-0.5).to(dtype)
    weight = torch.randn(columns, inner, device=DEVICE).to(dtype)
    bias = torch.randn(columns, device=DEVICE).to(dtype) if with_bias else None
    assert_close(linear(x, weight, bias), linear_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 65, 96, 128, 256, 300])
def test_products_with_the_norm_behind_them(rows: int, dtype: torch.dtype) -> None:
    """An MLP as the layers call it: with the norm in the product, behind it, and behind its parts."""
    hidden, inner = 1024, 4096
    x, residual = (torch.randn(rows, hidden, device=DEVICE).to(dtype) for _ in range(2))
    gate_up = (torch.randn(2 * inner, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    down = (torch.randn(hidden, inner, device=DEVICE) * inner**-0.5).to(dtype)
    norm = Norm(torch.randn(hidden, device=DEVICE).to(dtype), EPS)
    activated = swiglu_reference(linear_reference(x.double(), gate_up.double())).to(dtype)
    got = linear_swiglu(x, gate_up)
    assert_close(got, activated)
    expected = (residual.double() + linear_reference(got.double(), down.double())).to(dtype)
    normed = linear_add_norm(got, down, None, residual, norm)
    assert_close(residual, expected)
    assert (normed is None) == (rows == 1)
    if normed is not None:
        assert_close(normed, rms_norm_reference(residual, norm.weight, EPS))


@every_dtype
def test_copy_pages(dtype: torch.dtype) -> None:
    src = torch.randn(4, 2, 50, 4, 16, 128, device=DEVICE).to(dtype)
    dst = torch.full((4, 2, 30, 4, 16, 128), float("nan"), dtype=dtype, device=DEVICE)
    pairs = torch.tensor([[49, 1], [7, 29], [0, 4]], device=DEVICE)
    expected = dst.clone()
    copy_pages_reference(src, expected, pairs)
    copy_pages(src, dst, pairs)
    torch.testing.assert_close(dst, expected, atol=0, rtol=0, equal_nan=True)


def test_copy_pages_to_the_host_and_back() -> None:
    pool = torch.randn(2, 2, 20, 4, 16, 64, device=DEVICE)
    before = pool.clone()
    host = torch.empty(2, 2, 5, 4, 16, 64, pin_memory=True)
    copy_pages(pool, host, torch.tensor([[7, 0], [9, 3]]))
    copy_pages(host, pool, torch.tensor([[0, 1], [3, 2]]))
    assert torch.equal(pool[:, :, [1, 2]], before[:, :, [7, 9]])
    assert torch.equal(pool[:, :, 3:], before[:, :, 3:])


def test_a_sequence_does_not_depend_on_what_its_neighbours_hold() -> None:
    """Same lengths, other neighbours' contents: the first sequence's result stays the same to the bit."""
    case = case_of("qwen2-7b", [500, 77, 900], [1] * 3, torch.bfloat16)
    before = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.1)[0].clone()
    case.q[1:] *= 50
    others = torch.ones(case.k_cache.shape[0], dtype=torch.bool, device=DEVICE)
    others[case.batch.block_tables[0, : -(-500 // 16)].long()] = False
    case.k_cache[others] *= 30
    after = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.1)[0]
    assert torch.equal(before, after)
