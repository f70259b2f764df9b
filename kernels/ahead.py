"""Kernels compiled before they are launched: on as many threads as there are cores, while weights load."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
from triton.runtime.jit import JITFunction

NICENESS = 10  # of the threads that compile, and of the compilers they start


class _Compilers(ThreadPoolExecutor):
    """Threads that also do what is due when a kernel is first launched: compile its launcher, load both."""

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(self._compile, fn, *args, **kwargs)

    @staticmethod
    def _compile(fn, /, *args, **kwargs):
        kernel = fn(*args, **kwargs)
        kernel.run  # noqa: B018  (made when first asked for)
        return kernel


def _begin_thread(device: int) -> None:
    """Who serves on this machine meanwhile goes first: these threads keep every core busy."""
    os.nice(NICENESS)  # Linux: of the thread that calls it
    torch.cuda.set_device(device)


@contextmanager
def compiling_ahead(device: int) -> Iterator[None]:
    """In this block, launching a kernel has another thread compile it for this CUDA device, and nothing is
    launched. Leaving it waits until all are compiled. What can't be compiled fails when it is launched."""
    run = JITFunction.run

    def compile_only(self, *args, warmup, **options):
        return run(self, *args, warmup=True, **options)

    cores = len(os.sched_getaffinity(0))
    threads = _Compilers(cores, "compile", initializer=_begin_thread, initargs=(device,))
    JITFunction.run = compile_only
    try:
        with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run
