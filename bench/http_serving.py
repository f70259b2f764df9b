"""Latency over HTTP under open-loop arrivals: the worker's own socket and through the gateway.

    python -m bench.http_serving --tokenizer DIRECTORY --out bench/results/http_serving_h200.json

A fleet of one model (Qwen2-7B's shape, random weights, a real tokenizer of that vocabulary) is started as a
user would, `pagefleet up`; its start-up is timed by phase. Requests are bench/workload.py's `poisson`: 128
random prompt tokens, 128 new ones, streamed as text, sent at their time whether or not earlier ones are done.
Latency is from the time a request was due to its last byte. `bar` is what is aimed at for P99.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import machine, workload

MODEL = f"random:{Path(__file__).parent / 'models' / 'qwen2-7b.json'}"
PEER = {10: (703, 590), 20: (752, 630), 47: (1067, 850), 100: (5796, 1500)}  # rate: P99 of vLLM, bar, in ms
PATIENCE = 600.0
Address = str | tuple[str, int]


@contextlib.contextmanager
def fleet(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A running fleet: where to reach worker and gateway, and the seconds each phase of its start took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.json"  # JSON is YAML
        worker = {key: value for key, value in options.items() if key != "source"}
        model = {"name": "m", "source": options["source"], "worker": worker}
        file.write_text(
            json.dumps({
                "gateway": {"port": 0, "limits": {"default": {"qps": None}}},
                "supervisor": {"state_dir": f"{folder}/state"},
                "models": [model],
            })
        )  # fmt: skip
        command = [sys.executable, "-m", "gateway.cli", "up", str(file), "--json"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            url, phases = _await_ready(process, started)
            sockets = Path(folder) / "state" / "run"
            yield {
                "worker": str(next(sockets.glob("m-0.*.sock"))),
                "gateway": ("127.0.0.1", int(url.rpartition(":")[2].rstrip("/"))),
                "phases": phases,
            }
        finally:
            process.terminate()
            process.communicate()


def _await_ready(process: subprocess.Popen[str], started: float) -> tuple[str, dict[str, float]]:
    """The gateway's URL, and when each phase of the worker's start began, in seconds."""
    url, phases, event = "", {}, {}
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        url = event.get("url") or url
        if event.get("slot") == "m-0":
            name = "ready" if event.get("state") == "ready" else event.get("phase") or event.get("state")
            phases.setdefault(name, round(time.perf_counter() - started, 2))
        if event["event"] == "up":
            if event["failed"]:
                break
            return url, phases
    raise RuntimeError(f"the fleet did not come up: {event}")


async def one(address: Address, request: workload.Request, origin: float) -> tuple[float, float]:
    """Send a request when it is due; seconds from then to its first and to its last byte of text."""
    body = json.dumps({
        "model": "m", "prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    })  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    due = origin + request.arrival
    await asyncio.sleep(due - time.perf_counter())
    connect = (
        asyncio.open_unix_connection(address)
        if isinstance(address, str)
        else asyncio.open_connection(*address)
    )
    reader, writer = await connect
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"request {request.id}: {status!r} {await reader.read(2000)!r}")
    first, usage = 0.0, b""
    while line := await reader.readline():
        if not first and line.startswith(b"data: "):
            first = time.perf_counter() - due
        if b'"completion_tokens":' in line:
            usage = line
    last = time.perf_counter() - due
    writer.close()
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == request.max_tokens
    return first, last


async def arrivals(address: Address, requests: Sequence[workload.Request]) -> dict[str, float]:
    origin = time.perf_counter() + 0.2
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*(one(address, request, origin) for request in requests))
    elapsed = time.perf_counter() - origin
    latencies, firsts = sorted(last for _, last in results), [first for first, _ in results]
    return {
        "requests": len(results),
        "p50_ms": 1e3 * statistics.median(latencies),
        "p99_ms": 1e3 * latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)],
        "first_token_p50_ms": 1e3 * statistics.median(firsts),
        "output_tokens_per_second": sum(r.max_tokens for r in requests) / elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokenizer", help="directory with the tokenizer.json of that vocabulary")
    parser.add_argument("--worker", type=json.loads, default={}, help="more worker options, as JSON")
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 20, 47, 100])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--vocabulary", type=int, default=workload.VOCABULARY)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.describe(), "rows": []}
    options = {"source": arguments.model, **arguments.worker}
    if arguments.tokenizer:
        options["tokenizer"] = str(Path(arguments.tokenizer).absolute())
    with fleet(options) as running, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result["start_seconds"] = running["phases"]
        print(json.dumps(result), flush=True)
        warm = workload.poisson(10, 2, vocabulary=arguments.vocabulary)
        runner.run(arrivals(running["gateway"], warm))
        for rate in arguments.rates:
            for seed, way in enumerate(("worker", "gateway")):
                # The same arrivals both ways; other tokens, or the second way would find them cached.
                requests = workload.poisson(
                    rate, arguments.seconds, content_seed=seed, vocabulary=arguments.vocabulary
                )
                row = {"rate": rate, "to": way, **runner.run(arrivals(running[way], requests))}
                if rate in PEER:
                    row["vllm_p99_ms"], row["bar_p99_ms"] = PEER[int(rate)]
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
