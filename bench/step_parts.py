"""Where the time of an engine's step goes: its parts, timed in place while a bench runs."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worker.engine.loop import Engine
from worker.engine.scheduler import Scheduler
from worker.grammar.constraint import MaskWriter
from worker.runner.form_masks import FormMask
from worker.runner.step import Launched, Runner

# In the order in which they come. `step` is all of it; `sample` has `apply` in it.
PARTS: dict[str, tuple[type, str]] = {
    "step": (Engine, "step"),
    "schedule": (Scheduler, "schedule"),
    "forward": (Runner, "forward"),  # on a GPU: until it is launched
    "wait": (Launched, "read"),  # for the device; where it is next to nothing, the device waits for the host
    "fill": (MaskWriter, "write"),  # what forms allow next
    "sample": (Runner, "sample"),
    "apply": (FormMask, "apply"),  # on a GPU: until copy and kernel are queued
}
ON_DEVICE = "apply_on_device"  # between the two: the copy and the kernel


class StepParts:
    """Times of parts, in seconds, a list each."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time what engines do meanwhile."""
        before = {name: getattr(owner, method) for name, (owner, method) in PARTS.items()}
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, self._timing(name, before[name]))
        try:
            yield
        finally:
            for name, (owner, method) in PARTS.items():
                setattr(owner, method, before[name])
            self._read_events()

    def report(self) -> dict[str, dict[str, float]]:
        """Milliseconds of each part, of the steps that had it."""
        return {
            name: {"median": 1e3 * statistics.median(taken), "mean": 1e3 * statistics.fmean(taken)}
            for name in (*PARTS, ON_DEVICE)
            if (taken := self._seconds[name])
        }

    def _timing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self._seconds[name]
        on_device = name == "apply" and self._on_gpu

        def timed(*args: Any, **kwargs: Any) -> Any:
            if on_device:
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._events.append(pair)
                pair[0].record()
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - started)
                if on_device:
                    pair[1].record()

        return timed

    def _read_events(self) -> None:
        if self._events:
            torch.cuda.synchronize()
        self._seconds[ON_DEVICE] += [first.elapsed_time(last) / 1e3 for first, last in self._events]
        self._events.clear()
