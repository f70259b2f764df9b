"""The Triton kernels, interpreted on the CPU, in a process where other tests use torch or compiled kernels.

`triton.jit` decides at decoration whether a function is interpreted. So a second copy of the package is
imported with TRITON_INTERPRET set, sys.modules and the environment being left as they were; and while a test
runs, the functions of triton.language that are themselves written in Triton (sum, max) are interpreted too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

MODULES = (
    "attention",
    "attention_decode",
    "attention_dense",
    "attention_prefill",
    "copy_pages",
    "decode_plan",
    "gemm_skinny",
    "norm",
    "prepare",
    "rope_cache",
    "sampling",
    "swiglu",
    "token_mask",
)


def _take_kernels() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "kernels" or name.startswith("kernels.")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(scope="session")
def interpreted_modules() -> SimpleNamespace:
    ours = _take_kernels()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            return SimpleNamespace(**{name: importlib.import_module(f"kernels.{name}") for name in MODULES})
    finally:
        _take_kernels()
        sys.modules.update(ours)


@pytest.fixture
def interpreted(interpreted_modules: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Modules of kernels/ by name, whose `*_triton` functions run interpreted on CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(tl).items()):
            if isinstance(function, JITFunction):
                patch.setattr(tl, name, InterpretedFunction(function.fn))
        yield interpreted_modules
