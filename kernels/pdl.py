"""Programmatic dependent launch (Hopper on): a kernel starts while the one before it still runs.

Such a kernel says at once that its own successor may start, fetches what does not depend on its predecessors
(weights), and waits for them before it reads anything else or writes at all. Waiting means: until the
predecessor has ended, which has waited for its own. So every kernel launched with `launch_pdl` calls `begin`
first.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start, then wait until all earlier ones have ended."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the 128-byte lines at `pointers` to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_at_once(pointers):
    """Load int32 by an instruction of its own, which a loop's software pipeline takes for arithmetic: loads
    from addresses that depend on it are as many iterations ahead as if those were known."""
    return tl.inline_asm_elementwise(
        "ld.global.s32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
    )


def launch(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: PDL for `begin`, and Triton's own option."""
    return {"PDL": True, "launch_pdl": True} if supported(device) else {"PDL": False}


@functools.cache
def supported(device: torch.device) -> bool:
    """Whether kernels on this device can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
