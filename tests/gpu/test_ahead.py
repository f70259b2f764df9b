"""Kernels compiled ahead of their launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from kernels.ahead import compiling_ahead

pytestmark = pytest.mark.gpu


@triton.jit
def _add_kernel(p_x, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(p_x + o_x, tl.load(p_x + o_x) + 1)


@triton.jit
def _wrong_kernel(p_x, N: tl.constexpr):
    tl.store(p_x + tl.arange(0, N), tl.arange(0, 2 * N))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    return names


def test_launches_compile_and_nothing_runs(compiled: list[str]) -> None:
    x = torch.zeros(64, device="cuda")
    with compiling_ahead(0):
        _add_kernel[(1,)](x, N=64)
        _add_kernel[(1,)](x, N=64)
        _add_kernel[(1,)](x, N=32)
    assert x.sum().item() == 0
    assert len(compiled) == 2
    _add_kernel[(1,)](x, N=64)
    assert x.sum().item() == 64
    assert len(compiled) == 2


def test_what_cant_be_compiled_fails_when_launched() -> None:
    x = torch.zeros(64, device="cuda")
    with compiling_ahead(0):
        _wrong_kernel[(1,)](x, N=64)
    with pytest.raises(triton.CompilationError):
        _wrong_kernel[(1,)](x, N=64)
