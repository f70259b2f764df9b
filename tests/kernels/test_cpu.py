"""What is compiled for the CPU, and what takes its place where nothing can be."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from kernels import attention_cpu, cpu, norm, packed_matrix, rope_cache
from kernels.attention import paged_attention, paged_attention_reference
from kernels.cpu_decode import Decode
from kernels.cpu_gemm import Gemm
from kernels.cpu_jit import Module, vector_registers
from kernels.linear import linear_reference
from kernels.norm import rms_norm, rms_norm_reference
from kernels.rope_cache import rope_and_cache, rope_and_cache_reference
from kernels.swiglu import swiglu_reference

from .cases import assert_close, cos_sin, fused_qkv, paged_case

LENGTHS = [37, 5, 16, 1, 20, 12, 0, 200]


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    assert cpu.compiled() is not None
    if request.param == "torch":
        for module in (attention_cpu, norm, rope_cache):
            monkeypatch.setattr(module, "compiled", lambda: None)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norm(rows: int) -> None:
    x, weight = torch.randn(rows, 96)[:, 16:], torch.randn(80)
    assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("rotated", "dim"), [(64, 64), (32, 64), (80, 80)])
@pytest.mark.parametrize("apart", [False, True])
def test_rope_and_cache(rotated: int, dim: int, apart: bool) -> None:
    shape = {"q_heads": 6, "kv_heads": 2, "head_dim": dim, "page_size": 16}
    case = paged_case(LENGTHS, [1, 1, 1, 1, 7, 12, 1, 100], **shape)
    q, k, v = fused_qkv(len(case.q), 6, 2, dim, torch.float32)
    if apart:
        v = v.clone()
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    table = cos_sin(300, rotated)
    expected = rope_and_cache_reference(q, k, v, table, case.batch, k_cache, v_cache)
    assert_close(rope_and_cache(q, k, v, table, case.batch, case.k_cache, case.v_cache), expected)
    for mine, theirs in ((case.k_cache, k_cache), (case.v_cache, v_cache)):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("window", [0, 7, 100])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "page"), [(9, 3, 64, 16), (7, 1, 128, 8), (4, 2, 80, 24), (1, 1, 256, 32)]
)
def test_decodes(q_heads: int, kv_heads: int, dim: int, page: int, window: int) -> None:
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "page_size": page}
    case = paged_case(LENGTHS, [1] * len(LENGTHS), **shape)
    arguments = (case.q, case.k_cache, case.v_cache, case.batch, 0.125, window)
    assert_close(paged_attention(*arguments), paged_attention_reference(*arguments))


def test_nan_in_a_context_is_seen() -> None:
    case = paged_case([40, 40], [1, 1], q_heads=2, kv_heads=1, head_dim=64, page_size=16)
    page = case.batch.block_tables[1, 1]
    case.k_cache[page, 0, 3, 5] = torch.nan
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125, 0)
    assert out[0].isfinite().all()
    assert out[1].isnan().any()


def test_products_in_vectors_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is AVX-512: half as many panels, each as wide as two of its vectors."""
    module = Module("wide")
    width = Gemm(module, 16, 12).width
    kernels = cpu.compiled()
    assert kernels is not None
    wide = kernels._replace(width=width, product=module.compile().function("product"))
    monkeypatch.setattr(packed_matrix, "compiled", lambda: wide)
    for rows in (1, 4, 5, 30):
        x, weight = torch.randn(rows, 36), torch.randn(150, 36) / 6
        plain, gated = packed_matrix.pack(weight), packed_matrix.pack(weight, gated=True)
        assert plain is not None
        assert gated is not None
        assert plain.nbytes == 4 * 160 * 36
        expected = linear_reference(x, weight)
        assert_close(plain.product(x), expected)
        assert_close(plain.add_product(x, torch.ones(rows, 150)), 1 + expected)
        assert_close(gated.swiglu(x), swiglu_reference(expected))


def test_without_llvmlite_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    for name in ("cpu_decode", "cpu_gemm", "cpu_jit", "cpu_norm", "cpu_rope"):
        monkeypatch.delitem(sys.modules, f"kernels.{name}", raising=False)
    with caplog.at_level(logging.WARNING, "kernels.cpu"):
        assert cpu.compiled.__wrapped__() is None
    assert "llvmlite" in caplog.text


@pytest.mark.parametrize("registers", [(8, 16), (16, 32)])  # AVX2's and AVX-512's
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 1), (32, 7)])
@pytest.mark.parametrize("window", [0, 1500])
def test_rows_of_a_sequence_that_share_what_they_read(
    registers: tuple[int, int], dim: int, group: int, window: int
) -> None:
    """A piece of a prompt whose context is several segments: as the reference has it, and to the bit the same
    however many rows a task has."""
    module = Module("decode")
    kernel_of = Decode(module, dim, group, *min(registers, vector_registers()))  # or what the CPU has
    kernel = module.compile().function("decode")
    rows, length = 13, 2 * kernel_of.segment + 5  # the first rows end before the last segment
    shape = {"q_heads": 2 * group, "kv_heads": 2, "head_dim": dim, "page_size": 16}
    case = paged_case([length], [rows], **shape)
    lengths = torch.arange(length - rows + 1, length + 1, dtype=torch.int32)
    one, five, all_ = (
        attention_cpu._decode_compiled(
            kernel, case.q, case.k_cache, case.v_cache, case.batch.block_tables.expand(rows, -1), lengths,
            0.125, window, task_rows,
        )
        for task_rows in (1, 5, cpu.TASK_ROWS)
    )  # fmt: skip
    assert_close(
        one, paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, 0.125, window)
    )
    assert torch.equal(one, five)
    assert torch.equal(one, all_)
