"""Where the time of a decode step goes, kernel by kernel.

python -m bench.gpu_profile --batch 1 64 256 --context 512
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import gpu_engine
from worker import LLM


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    llm = LLM(gpu_engine.MODEL, dtype="bfloat16")
    for batch in arguments.batch:
        gpu_engine.decode_ms(llm._engine, batch, arguments.context, 8)
        steps = gpu_engine.decoding(llm._engine, batch, arguments.context, arguments.steps + 4)
        for _ in range(3):
            next(steps)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(arguments.steps):
                next(steps)
            torch.cuda.synchronize()
        for _ in steps:
            pass
        report(recorded, batch, arguments.steps)


def report(recorded: profile, batch: int, steps: int) -> None:
    """Microseconds a step and launches a step, by kernel."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    spans = []
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name] += event.device_time
            count[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    wall = spans[-1][1] - spans[0][0]
    busy = sum(total.values())
    figures = f"{wall / steps:.0f} us a step, {busy / steps:.0f} busy, {len(spans) / steps:.0f} kernels"
    print(f"--- batch {batch}: {figures}")
    for name, time in sorted(total.items(), key=lambda item: -item[1])[:22]:
        print(f"{time / steps:9.1f} us {count[name] / steps:7.1f} x {time / count[name]:8.2f}  {name[:100]}")


if __name__ == "__main__":
    main()
