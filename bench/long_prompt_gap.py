"""A prompt of 30,000 tokens arrives among 8 streams: the gaps between their tokens, over HTTP.

    python -m bench.long_prompt_gap --out bench/results/long_prompt_gap.json
    python -m bench.long_prompt_gap --device cuda --out bench/results/long_prompt_gap_h200.json

A worker with random weights, once with a bound on what prompts add to a step (a CPU's default; on a GPU
`--tpot-target-ms 8`) and once without. The streams decode for a while alone; then the prompt comes and asks
for one token; then they decode alone again. A gap is the time between two pieces of a stream as the client
gets them. Streams that grow to thousands of tokens meanwhile take longer also alone, so each gap is compared
with the median gap without the prompt at that time, which lies between those before and behind it. Aim: while
the prompt is computed the worst gap of all streams is at most three times that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import machine

MODELS = Path(__file__).parent / "models"
SHAPES = {"cpu": MODELS / "small-long.json", "cuda": MODELS / "qwen2-7b.json"}
STREAMS, PROMPT, LONG = 8, 64, 30_000
ALONE = 200  # tokens of each stream before the prompt comes
BOUND = {"cpu": [], "cuda": ["--tpot-target-ms=8"]}
AIM = 3.0


@contextmanager
def worker(shape: Path, device: str, threads: int, *options: str) -> Iterator[str]:
    """A worker process, started; the path of its Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/worker.sock"
        command = [
            *(sys.executable, "-m", "worker", "--model", f"random:{shape}", "--served-model-name", "m"),
            *("--uds", path, "--device", device, "--threads", str(threads), "--disable-log-stats"),
            *("--parent-pid", str(os.getpid()), *options),
        ]
        process = subprocess.Popen(command)
        try:
            yield path
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def lines(path: str, request: str, data: bytes = b"{}") -> AsyncIterator[bytes]:
    """The lines of an answer's body, as they come. `data`: the request's, as JSON."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{request} HTTP/1.1\r\nHost: worker\r\nContent-Length: {len(data)}\r\n".encode())
    writer.write(b"Connection: close\r\n\r\n" + data)
    try:
        status = await reader.readline()
        while await reader.readline() != b"\r\n":
            pass
        if b" 200 " not in status:
            raise RuntimeError(f"{request}: {status!r} {await reader.read(1000)!r}")
        while line := await reader.readline():
            if line.startswith(b"{"):
                yield line
    finally:
        writer.close()


async def ready(path: str) -> None:
    for _ in range(3000):
        await asyncio.sleep(0.1)
        try:
            async for _ in lines(path, "GET /ready"):
                return
        except (OSError, RuntimeError):
            continue
    raise RuntimeError("the worker isn't ready after 5 minutes")


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 30_000) for _ in range(count)]


async def stream(path: str, seed: int, times: list[float]) -> None:
    """Notes when each piece comes; goes on until it is cancelled."""
    body = {
        "model": "m",
        "prompt": tokens(seed, PROMPT),
        "ignore_eos": True,
        "seed": seed,
        "max_tokens": 20_000,
    }
    async for _ in lines(path, "POST /generate_stream", json.dumps(body).encode()):
        times.append(time.perf_counter())


async def measure(path: str) -> dict[str, float]:
    await ready(path)
    every: list[list[float]] = [[] for _ in range(STREAMS)]
    # Made before: meanwhile this process would read no stream.
    long = json.dumps(
        {"model": "m", "prompt": tokens(99, LONG), "max_tokens": 1, "ignore_eos": True}
    ).encode()
    tasks = [asyncio.create_task(stream(path, i, times)) for i, times in enumerate(every)]
    while min(map(len, every)) < ALONE:
        await asyncio.sleep(0.05)
    sent = time.perf_counter()
    answer = [line async for line in lines(path, "POST /generate", long)]
    answered = time.perf_counter()
    last = min(map(len, every)) + ALONE
    while min(map(len, every)) < last:
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert json.loads(answer[0])["usage"]["completion_tokens"] == 1
    gaps = [(b, b - a) for times in every for a, b in pairwise(times[ALONE // 4 :])]
    alone = [gap for at, gap in gaps if at <= sent]
    beside = [(at, gap) for at, gap in gaps if sent < at <= answered]
    behind = [gap for at, gap in gaps if at > answered + max(alone)]
    before, after = statistics.median(alone), statistics.median(behind)

    def usual(at: float) -> float:
        return before + (after - before) * (at - sent) / (answered - sent)

    long_gaps = [gap for _, gap in beside]
    ratios = [gap / usual(at) for at, gap in beside]
    return {
        "median_alone_before_ms": 1e3 * before,
        "median_alone_after_ms": 1e3 * after,
        "worst_alone_ms": 1e3 * max(*alone, *behind),
        "median_ms": 1e3 * statistics.median(long_gaps),
        "p99_ms": 1e3 * statistics.quantiles(long_gaps, n=100)[98],
        "worst_ms": 1e3 * max(long_gaps),
        "median_of_alone": statistics.median(ratios),
        "p99_of_alone": statistics.quantiles(ratios, n=100)[98],
        "worst_of_alone": max(ratios),
        "worst_of_alone_before": max(long_gaps) / before,
        "prompt_seconds": answered - sent,
        "tokens_of_streams": len(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--options", nargs="*", default=[], help="further flags of the worker, without --")
    parser.add_argument(
        "--ways", nargs="+", choices=("bounded", "unbounded"), default=["bounded", "unbounded"]
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options = [f"--{option}" for option in given.options]
    ways = {"bounded": [*options, *BOUND[given.device]], "unbounded": [*options, "--tpot-target-ms=0"]}
    result: dict[str, Any] = {"machine": machine.describe(), "model": SHAPES[given.device].name}
    result |= {"streams": STREAMS, "prompt_tokens": LONG, "threads": given.threads}
    for way in given.ways:
        with worker(SHAPES[given.device], given.device, given.threads, *ways[way]) as path:
            result[way] = asyncio.run(measure(path))
    if "bounded" in result:
        result["met"] = result["bounded"]["worst_of_alone"] <= AIM
    machine.publish(result, given.out)


if __name__ == "__main__":
    main()
