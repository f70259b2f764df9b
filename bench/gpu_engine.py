"""Engine speed on a GPU: decode steps by batch and context, prefill, offline throughput.

    python -m bench.gpu_engine --out bench/results/gpu_engine.json [--rows decode,prefill,mixed,prefix]
    [--eager | --kv-cache-dtype fp8]

Qwen2-7B shape, bf16, random weights, greedy, end of sequence ignored; the requests are those of
bench/workload.py. `vllm` is what vLLM 0.26.0 reached on the same kind of card, `bar` what is aimed at;
docs/performance.md says how they were taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import machine, workload
from worker import LLM, SamplingParams
from worker.engine.loop import Engine
from worker.ipc.messages import EngineRequest

MODEL = f"random:{Path(__file__).parent / 'models' / 'qwen2-7b.json'}"
DECODE = {  # (batch, context): (vLLM, bar) in ms
    (1, 128): (4.72, 3.95),
    (8, 512): (4.87, 4.15),
    (32, 512): (5.14, 4.5),
    (64, 512): (5.42, 4.9),
    (128, 512): (6.45, 5.8),
    (256, 512): (9.6, 8.6),
    (1, 4096): (4.80, 4.0),
    (32, 4096): (6.65, 6.0),
    (128, 4096): (12.6, 11.8),
}
PREFILL = {  # (requests, length): (vLLM, bar) in ms
    (1, 128): (15.6, 12.0),
    (1, 2048): (49.7, 49.0),
    (1, 8192): (197.6, 197.0),
    (1, 32000): (1028.0, 1080.0),
    (32, 1024): (719.0, 715.0),
}

MIXED = (60.6, 68.0)  # (vLLM, bar) in requests a second
MIXED_EAGER = (20.2, 40.0)

# With a KV cache in FP8: rows for which there are figures of vLLM's.
FP8_DECODE = {(32, 4096): (6.24, 5.4), (128, 4096): (11.0, 9.6)}
FP8_MIXED = (58.7, 68.0)

Row = dict[str, Any]


def submit(engine: Engine, requests: list[workload.Request], **params: Any) -> None:
    for request in requests:
        values = {"temperature": 0.0, "max_tokens": request.max_tokens, "ignore_eos": True, **params}
        sampling = SamplingParams(**values)
        message = EngineRequest(
            str(request.id), request.prompt, sampling, request.id, arrival=time.monotonic()
        )
        refused = engine.add(message)
        assert refused is None, refused


def run_all(engine: Engine, requests: list[workload.Request], **params: Any) -> tuple[float, int]:
    """Seconds until all are done, and tokens generated."""
    started = time.perf_counter()
    submit(engine, requests, **params)
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    return time.perf_counter() - started, tokens


def decoding(engine: Engine, batch: int, context: int, steps: int) -> Iterator[float]:
    """Bring `batch` sequences to about `context` tokens, then yield the end of each step in which all of them
    decode."""
    prefill_steps = batch * context // engine.info.max_num_batched_tokens + 2
    # Those prefilled first decode while the others are prefilled: room for that, and all are ended together.
    requests = workload.fixed(
        batch, context - steps // 2, steps + prefill_steps, seed=batch * 100_003 + context
    )
    submit(engine, requests)
    full = 0
    while full < steps:
        if len(engine.step()) == batch:
            full += 1
            yield time.perf_counter()
    for request in requests:
        engine.abort(str(request.id))
    engine.drain()


def decode_ms(engine: Engine, batch: int, context: int, steps: int = 64) -> float:
    """Median time between steps in which all `batch` sequences decode at about `context` tokens."""
    ends = list(decoding(engine, batch, context, steps))
    return statistics.median(b - a for a, b in itertools.pairwise(ends[2:])) * 1000


def prefill_ms(engine: Engine, count: int, length: int) -> float:
    """Time until `count` prompts of `length` tokens have their first token; median of 3, other tokens each
    time."""
    times = [run_all(engine, workload.fixed(count, length, 1, seed=7919 * length + i))[0] for i in range(4)]
    return statistics.median(times[1:]) * 1000


def weights_ms(engine: Engine, copy_tb_s: float) -> float:
    """Time to read at the copy's rate what a step reads of the weights: all but the embedding."""
    model = engine.runner.model
    return (model.weight_bytes - model.named_parameters["embedding.weight"].nbytes) / copy_tb_s / 1e9


def mixed_figures(engine: Engine) -> tuple[float, float]:
    if engine.config.enforce_eager:
        return MIXED_EAGER
    return FP8_MIXED if in_fp8(engine) else MIXED


def in_fp8(engine: Engine) -> bool:
    return engine.info.kv_cache_dtype == "float8_e4m3fn"


def measure(engine: Engine, kinds: set[str], say: Callable[[Row], None], copy_tb_s: float) -> None:
    if "decode" in kinds:
        for (batch, context), (vllm, bar) in (FP8_DECODE if in_fp8(engine) else DECODE).items():
            row: Row = {"row": f"decode batch {batch} context {context}", "unit": "ms", "vllm": vllm,
                        "bar": bar, "ours": decode_ms(engine, batch, context)}  # fmt: skip
            if batch == 1:
                row["share_of_reading_weights"] = weights_ms(engine, copy_tb_s) / row["ours"]
            say(row)
    if "prefill" in kinds:
        for (count, length), (vllm, bar) in PREFILL.items():
            say({"row": f"prefill {count} x {length}", "unit": "ms", "vllm": vllm, "bar": bar,
                 "ours": prefill_ms(engine, count, length)})  # fmt: skip
    if "prefix" in kinds:
        run_all(engine, workload.shared_prefix(seed=1))
        seconds, _ = run_all(engine, workload.shared_prefix())
        say(
            {"row": "shared prefix 64 x (4096 + 64)", "unit": "s", "vllm": 0.75, "bar": 0.70, "ours": seconds}
        )
    if "mixed" in kinds:
        requests = workload.mixed()
        assert workload.sha256(requests) == workload.MIXED_1000_SHA256
        seconds, tokens = run_all(engine, requests)
        vllm, bar = mixed_figures(engine)
        say({"row": "mixed 1000", "unit": "req/s", "vllm": vllm, "bar": bar, "ours": len(requests) / seconds,
             "tokens_per_second": tokens / seconds})  # fmt: skip
    if "sampled" in kinds:
        seconds, _ = run_all(engine, workload.mixed(content_seed=1), temperature=0.7, top_p=0.9, top_k=50)
        say({"row": "mixed 1000, sampled", "unit": "req/s", "vllm": 59.5, "bar": 67, "ours": 1000 / seconds})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="default: all, with FP8 decode,mixed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    arguments = parser.parse_args()
    all_rows = "decode,prefill,prefix,mixed,sampled" if arguments.kv_cache_dtype == "auto" else "decode,mixed"
    result: dict[str, Any] = {"machine": machine.describe(), "rates": machine.gpu_rates(), "rows": []}
    print(json.dumps(result["machine"]), json.dumps(result["rates"]), flush=True)
    llm = LLM(
        MODEL,
        dtype="bfloat16",
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enforce_eager=arguments.eager,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    result["engine"] = {name: getattr(llm.info, name) for name in llm.info.__struct_fields__}
    print(json.dumps(result["engine"]), flush=True)
    run_all(llm._engine, workload.mixed(100, seed=99))

    def say(row: Row) -> None:
        result["rows"].append(row)
        figures = f"{row['ours']:9.2f} {row['unit']:6} vLLM {row['vllm']:8.2f}  bar {row['bar']:8.2f}"
        print(f"{row['row']:34} {figures}", flush=True)

    measure(llm._engine, set((arguments.rows or all_rows).split(",")), say, result["rates"]["copy_tb_s"])
    assert llm.check_integrity() == ""
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
