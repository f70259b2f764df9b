"""What is compiled for the CPU at hand; where nothing is, callers do with torch's operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

logger = logging.getLogger(__name__)
LANES = 8  # float32 values in a vector: one of AVX2, two of NEON; sizes that aren't multiples are torch's
TASK_ROWS = 16  # of a piece of a prompt that one task of `decode` attends for, at most
PARALLEL_ROWS = 64  # from which a kernel over rows takes more threads than the caller's


class Kernels(NamedTuple):
    """Functions of addresses and sizes, as the modules that build them list them, and of threads."""

    width: int  # of the product's panels
    product: Callable[..., None]
    rms_norm: Callable[..., None]
    rope_and_cache: Callable[..., None]
    decode: Callable[[int, int], Callable[..., None]]  # by a head's size, and query heads a KV head


@lru_cache
def compiled() -> Kernels | None:
    """The kernels, compiled at the first call, in less than a second. None, and why in the log, where
    llvmlite, the CPU or torch's build don't allow it."""
    try:
        from kernels.cpu_decode import decode
        from kernels.cpu_gemm import Gemm
        from kernels.cpu_jit import Module, vector_registers
        from kernels.cpu_norm import add_rms_norm
        from kernels.cpu_rope import add_rope_and_cache

        module = Module("cpu")
        width = Gemm(module, *vector_registers()).width
        add_rms_norm(module)
        add_rope_and_cache(module)
        code = module.compile()
    except Exception as error:  # of any part of a compiler: the engine works without it, only slower
        logger.warning("no kernels compiled for this CPU, torch's operations instead: %s", error)
        return None
    logger.info("kernels compiled for this CPU, %d columns a panel", width)
    product, rms_norm, rope_and_cache = map(code.function, ("product", "rms_norm", "rope_and_cache"))
    return Kernels(width, product, rms_norm, rope_and_cache, decode)
