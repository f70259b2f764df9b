"""The Triton kernels, interpreted on the CPU, in a process where other tests use torch or compiled kernels.

`triton.jit` decides at decoration whether a function is interpreted. So a second copy of the package is
imported with TRITON_INTERPRET set, sys.modules and the environment being left as they were; and while a test
runs, the functions of triton.language that are themselves written in Triton (sum, max) are interpreted too.

Conversions to and from FP8 are torch's then: the interpreter's own lose a carry when they round (1.97 becomes
1), and don't know NaN. What is too large becomes NaN: a kernel must not rely on a conversion that saturates.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
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


_convert = interpreter._convert_float
_FP8 = torch.float8_e4m3fn


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The interpreter's own, but for FP8; bits in, bits out."""
    if source == tl.float8e4nv:
        wide = torch.from_numpy(values.view(np.uint8).copy()).view(_FP8).float().numpy()
        return wide.view(np.uint32) if target == tl.float32 else _convert(wide, tl.float32, target, rounding)
    if target == tl.float8e4nv:
        if source != tl.float32:
            values = _convert(values, source, tl.float32, None).view(np.float32)
        exact = torch.from_numpy(values.view(np.float32).copy())
        narrow = torch.where(exact.abs() <= 464, exact, torch.nan).to(_FP8)
        return narrow.view(torch.uint8).numpy().reshape(values.shape)
    return _convert(values, source, target, rounding)


@pytest.fixture
def interpreted(interpreted_modules: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Modules of kernels/ by name, whose `*_triton` functions run interpreted on CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(tl).items()):
            if isinstance(function, JITFunction):
                patch.setattr(tl, name, InterpretedFunction(function.fn))
        patch.setattr(interpreter, "_convert_float", _convert_float)
        yield interpreted_modules
