"""Every kernel against the card's own limits: time, rate, and share of the same run's copy or matmul rate.

python -m bench.kernels_roofline [--json FILE] [--only SUBSTRING] [--kv-cache-dtype fp8]

Times are medians of CUDA-graph replays. A graph calls the kernel on sets of inputs in turn, so many that over
`BETWEEN` bytes go by before any is read again: nothing comes from the L2 cache that a real step must fetch.
(At most `MAX_SETS`; inputs that small are activations, which a real step finds in the cache, too.)
Memory-bound kernels are rated by the bytes that must move, compute-bound ones by the operations that must be
done. With --kv-cache-dtype fp8: what reads or writes the KV cache, and that in FP8.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.machine import describe, gpu_rates
from kernels.attention import paged_attention, rope_and_decode_triton
from kernels.batch import AttentionBatch
from kernels.cache_types import FP8
from kernels.copy_pages import copy_pages
from kernels.linear import linear
from kernels.norm import add_rms_norm
from kernels.qk_norm import QkNorm
from kernels.rope_cache import rope_and_cache
from kernels.swiglu import swiglu

BETWEEN = 500_000_000  # bytes
MAX_SETS = 512
DTYPE = torch.bfloat16
PAGE_SIZE = 16
REPLAYS = 20
DECODES = [(1, 512), (1, 4096), (1, 32_768), (8, 512), (32, 512), (32, 4096), (128, 4096), (256, 512)]
PREFILLS = [(1, 2048, 2048), (1, 8192, 8192), (1, 2048, 32_768), (8, 1024, 1024)]  # sequences, rows, context


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    dim: int
    qk_norm: bool = False


MODELS = (
    Model("qwen2-7b", 3584, 18944, 28, 4, 128),
    Model("llama-3-8b", 4096, 14336, 32, 8, 128),
    Model("phi-3-mini", 3072, 8192, 32, 32, 96),
    Model("qwen3-8b", 4096, 12288, 32, 8, 128, qk_norm=True),
)


@dataclass(frozen=True)
class Case:
    """A kernel at a shape: `make` allocates one set of inputs and returns the call on them."""

    kernel: str
    shape: str
    make: Callable[[], Callable[[], Any]]
    num_bytes: int  # that must be read and written
    flops: int = 0  # set for what the matmul rate limits


@dataclass(frozen=True)
class Result:
    kernel: str
    shape: str
    microseconds: float
    rate: float
    unit: str
    share: float  # of the run's copy bandwidth, or matmul rate


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _batch(lengths: list[int], queries: int) -> AttentionBatch:
    """Sequences in randomly placed pages, each with `queries` rows."""
    pages = [-(-n // PAGE_SIZE) for n in lengths]
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    placed = (torch.randperm(sum(pages)) + 1).int().split(pages)
    for row, own in zip(tables, placed):
        row[: len(own)] = own
    positions = torch.stack([torch.arange(n - queries, n) for n in lengths])
    slots = tables.long().gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
    return AttentionBatch(
        positions=positions.flatten().cuda(),
        slots=slots.flatten().cuda(),
        block_tables=tables.cuda(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        query_starts=torch.arange(0, len(lengths) * queries + 1, queries, dtype=torch.int32, device="cuda"),
        num_decodes=len(lengths) if queries == 1 else 0,
        max_query_len=queries,
        max_seq_len=max(lengths),
    )


def _cache(model: Model, batch: AttentionBatch, kv_dtype: torch.dtype) -> Tensor:
    shape = (2, int(batch.block_tables.max()) + 1, model.kv_heads, PAGE_SIZE, model.dim)
    return _random(*shape).to(kv_dtype)


def _attention(
    model: Model, lengths: list[int], queries: int, kv_dtype: torch.dtype
) -> Callable[[], Callable[[], Any]]:
    batch = _batch(lengths, queries)
    angles = torch.randn(max(lengths), model.dim, device="cuda")

    def make() -> Callable[[], Any]:
        k_cache, v_cache = _cache(model, batch, kv_dtype)
        rows, scale = len(lengths) * queries, model.dim**-0.5
        if queries > 1:
            q = _random(rows, model.q_heads, model.dim)
            return lambda: paged_attention(q, k_cache, v_cache, batch, scale)
        heads = (model.q_heads, model.kv_heads, model.kv_heads)
        q, k, v = _random(rows, sum(heads), model.dim).split(heads, 1)
        return lambda: rope_and_decode_triton(q, k, v, angles, batch, k_cache, v_cache, scale)

    return make


def attention_cases(model: Model, kv_dtype: torch.dtype) -> Iterator[Case]:
    """Decodes are rated by the bytes of keys and values, prefills by the operations of visible pairs. Decodes
    rotate and write the step's own token on the way, as in an engine's steps."""
    token = 2 * model.kv_heads * model.dim * kv_dtype.itemsize
    row = 2 * model.q_heads * model.dim * DTYPE.itemsize
    for sequences, context in DECODES:
        moved = sequences * (context * token + row)
        make = _attention(model, [context] * sequences, 1, kv_dtype)
        yield Case("decode attention", f"{model.name} {sequences} x {context}", make, moved)
    mixed = [200 + i * 61 % 3800 for i in range(64)]
    yield Case(
        "decode attention",
        f"{model.name} 64 x 200..4000",
        _attention(model, mixed, 1, kv_dtype),
        sum(mixed) * token + 64 * row,
    )
    for sequences, queries, context in PREFILLS:
        pairs = queries * (context - queries) + queries * (queries + 1) // 2
        make = _attention(model, [context] * sequences, queries, kv_dtype)
        shape = f"{model.name} {sequences} x {queries} of {context}"
        moved = sequences * (context * token + queries * row)
        yield Case("prefill attention", shape, make, moved, 4 * sequences * pairs * model.q_heads * model.dim)


def rope_cases(model: Model, kv_dtype: torch.dtype) -> Iterator[Case]:
    for tokens in (1, 32, 256, 8192):
        batch = _batch([tokens], tokens)
        heads = (model.q_heads, model.kv_heads, model.kv_heads)

        def make(
            batch: AttentionBatch = batch, tokens: int = tokens, heads: Any = heads
        ) -> Callable[[], Any]:
            k_cache, v_cache = _cache(model, batch, kv_dtype)
            q, k, v = _random(tokens, sum(heads), model.dim).split(heads, 1)
            table = torch.randn(tokens, model.dim, device="cuda")
            norm = QkNorm(_random(model.dim), _random(model.dim), 1e-6) if model.qk_norm else None
            return lambda: rope_and_cache(q, k, v, table, batch, k_cache, v_cache, norm)

        written = model.q_heads * DTYPE.itemsize + 2 * model.kv_heads * kv_dtype.itemsize
        moved = tokens * (model.dim * (sum(heads) * DTYPE.itemsize + written) + model.dim * 4 + 16)
        name = "qk norm + rope + cache write" if model.qk_norm else "rope + cache write"
        yield Case(name, f"{model.name} {tokens}", make, moved)


def elementwise_cases(model: Model) -> Iterator[Case]:
    hidden, inner, size = model.hidden, model.inner, DTYPE.itemsize
    for tokens in (1, 32, 256, 8192):

        def norm(tokens: int = tokens) -> Callable[[], Any]:
            x, residual, weight = _random(tokens, hidden), _random(tokens, hidden), _random(hidden)
            return lambda: add_rms_norm(x, residual, weight, 1e-6)

        def activation(tokens: int = tokens) -> Callable[[], Any]:
            gate_up = _random(tokens, 2 * inner)
            return lambda: swiglu(gate_up)

        shape = f"{model.name} {tokens}"
        yield Case("add + rms norm", shape, norm, (4 * tokens + 1) * hidden * size)
        yield Case("swiglu", shape, activation, 3 * tokens * inner * size)


def linear_cases(model: Model) -> Iterator[Case]:
    qkv = (model.q_heads + 2 * model.kv_heads) * model.dim
    shapes = {
        "qkv": (qkv, model.hidden),
        "o": (model.hidden, model.q_heads * model.dim),
        "gate_up": (2 * model.inner, model.hidden),
        "down": (model.hidden, model.inner),
    }
    for name, (columns, inner) in shapes.items():
        for rows in (1, 8, 32, 64, 256, 8192):

            def make(rows: int = rows, columns: int = columns, inner: int = inner) -> Callable[[], Any]:
                x, weight = _random(rows, inner), _random(columns, inner)
                return lambda: linear(x, weight)

            moved = (columns * inner + rows * (columns + inner)) * DTYPE.itemsize
            flops = 2 * rows * columns * inner if rows >= 256 else 0
            yield Case("linear", f"{model.name} {name} {rows}", make, moved, flops)


def copy_cases(model: Model, kv_dtype: torch.dtype) -> Iterator[Case]:
    pages, page = 1024, model.kv_heads * PAGE_SIZE * model.dim
    pairs = torch.stack((torch.randperm(pages), torch.randperm(pages) + pages), 1).cuda()

    def make() -> Callable[[], Any]:
        pool = _random(4, 2, 2 * pages, model.kv_heads, PAGE_SIZE, model.dim).to(kv_dtype)
        return lambda: copy_pages(pool, pool, pairs)

    yield Case(
        "copy pages", f"{model.name} 4 layers x {pages}", make, 2 * 4 * 2 * pages * page * kv_dtype.itemsize
    )


def all_cases(kv_dtype: torch.dtype) -> Iterator[Case]:
    for model in MODELS:
        for of_the_cache in (attention_cases, rope_cases, copy_cases):
            yield from of_the_cache(model, kv_dtype)
        if kv_dtype == DTYPE:
            yield from elementwise_cases(model)
            yield from linear_cases(model)


def time_us(case: Case) -> float:
    """Median microseconds a call, over replays of a graph that goes once through all sets of inputs."""
    calls = [case.make() for _ in range(min(MAX_SETS, BETWEEN // case.num_bytes + 2))]
    repeats = max(1, 32 // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls * repeats:
                call()
        times: list[float] = []
        for _ in range(REPLAYS + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / (len(calls) * repeats))
    return statistics.median(times[3:])


def measure(case: Case, rates: dict[str, float]) -> Result:
    microseconds = time_us(case)
    if case.flops:
        rate, unit, limit = case.flops / microseconds / 1e6, "TFLOP/s", rates["matmul_tflop_s"]
    else:
        rate, unit, limit = case.num_bytes / microseconds / 1e3, "GB/s", rates["copy_tb_s"] * 1000
    return Result(case.kernel, case.shape, microseconds, rate, unit, rate / limit)


def show(results: list[Result], rates: dict[str, float]) -> None:
    title = f"copy {rates['copy_tb_s']:.2f} TB/s, 8192³ bf16 matmul {rates['matmul_tflop_s']:.0f} TFLOP/s"
    table = Table("kernel", "shape", "µs", "rate", "of limit", title=title)
    for r in results:
        rate = f"{r.rate:,.0f} {r.unit}"
        table.add_row(r.kernel, r.shape, f"{r.microseconds:.1f}", rate, f"{r.share:.0%}")
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", default="", help="only cases whose kernel or shape contains this")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    options = parser.parse_args()
    kv_dtype = FP8 if options.kv_cache_dtype == "fp8" else DTYPE
    rates = gpu_rates()
    torch.cuda.empty_cache()
    results = []
    for case in all_cases(kv_dtype):
        if options.only in f"{case.kernel} {case.shape}":
            results.append(measure(case, rates))
            torch.cuda.empty_cache()
    show(results, rates)
    if options.json:
        report = {
            "machine": describe(), "rates": rates, "kv_cache_dtype": str(kv_dtype).removeprefix("torch."),
            "results": [asdict(r) for r in results],
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
