"""What machine a figure was made on, and its own ceilings, measured in the same run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def host() -> dict[str, Any]:
    """Processor, Python and the command, for the result file of a bench that computes nothing."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
    }


def publish(result: dict[str, Any], out: Path | None) -> None:
    """A bench's figures, as JSON on stdout and in its result file."""
    print(json.dumps(result, indent=1))
    save(result, out)


def save(result: dict[str, Any], out: Path | None) -> None:
    """A bench's figures in its result file, for a bench that has shown them its own way."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def describe() -> dict[str, Any]:
    """`host` and the versions and card that a bench of the engine depends on."""
    import torch
    import triton

    info = {**host(), "torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        info["gpu"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} SMs"
    return info


def gpu_rates() -> dict[str, float]:
    """Copy bandwidth (bytes read + written) in TB/s and the rate of an 8192³ bf16 product in TFLOP/s; random
    data."""
    import torch

    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    copy = _median_ms(partial(target.copy_, source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = _median_ms(partial(torch.mm, a, b))
    return {"copy_tb_s": 2 * 4 * (1 << 30) / copy / 1e9, "matmul_tflop_s": 2 * 8192**3 / product / 1e9}


def cpu_gemm_gflops(threads: int) -> float:
    """float32 1024³ product in GFLOP/s with `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * 1024**3 / best / 1e9


def _median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    import torch

    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
