"""Which tiles are fastest on this card: candidates for skinny products and attention, in microseconds.

python -m bench.tune_kernels [gemm] [decode] [decode-fp8] [prefill]

Qwen2-7B's shapes, bf16 (decode-fp8: with a KV cache in FP8). What wins goes into kernels/gemm_skinny.py
(best_tile), attention_decode.py and attention_dense.py. Every candidate runs in a graph, over buffers that
rotate so that no cache helps.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_decode import Tile as DecodeTile
from kernels.attention_decode import decode_attention_triton
from kernels.attention_dense import Tile as DenseTile
from kernels.attention_dense import dense_attention, dense_attention_triton
from kernels.attention_prefill import prefill_attention_triton
from kernels.batch import AttentionBatch
from kernels.cache_types import FP8
from kernels.gemm_skinny import Tile, skinny_triton
from kernels.swiglu import swiglu

SHAPES = {
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "head": (152064, 3584),
}
ROWS = (1, 8, 32, 64)
DECODE = (
    (1, 4096),
    (8, 512),
    (32, 512),
    (64, 512),
    (128, 512),
    (256, 512),
    (32, 4096),
    (128, 4096),
    (1, 32768),
)
PREFILL = ((1, 8192, 8192), (1, 32000, 7424), (8, 1024, 1024))  # sequences, context, its last so many queried
DECODE_TILES = [
    DecodeTile(*t)
    for t in (
        (64, 4, 2, 128),
        (64, 4, 3, 128),
        (64, 4, 4, 128),
        (128, 4, 2, 128),
        (128, 4, 3, 128),
        (128, 4, 3),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (64, 4, 5),
        (32, 4, 4),
    )
]
DENSE_TILES = [
    DenseTile(*t)
    for t in ((64, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3))
]
KV_DTYPES = {"decode": torch.bfloat16, "decode-fp8": FP8}
BETWEEN = 1 << 29  # bytes read between two reads of the same line
BANDWIDTH = 4.2e6  # bytes a microsecond

Run = Callable[[int], Any]  # one call, on the i-th set of buffers


def graph_us(run: Run, calls: int) -> float:
    """Microseconds a call in a graph of so many calls; median of several replays."""
    stream = torch.cuda.Stream()
    times = []
    torch.cuda.synchronize()  # the inputs were made on another stream
    with torch.cuda.stream(stream):
        run(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                run(i)
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return float(statistics.median(times[2:]))


def rank(title: str, floor_us: float, runs: dict[str, Run], calls: int) -> None:
    """Print the fastest first; a candidate that can't run on this card says why."""
    results = []
    for name, run in runs.items():
        try:
            results.append((graph_us(run, calls), name))
        except Exception as error:
            print(f"{title}: {name} fails: {str(error).splitlines()[0][:80]}")
    fastest = "   ".join(f"{us:.1f} {name}" for us, name in sorted(results)[:6])
    print(f"{title}, floor {floor_us:.1f}:  {fastest}", flush=True)


def gemm_tiles(name: str, rows: int) -> list[Tile]:
    """Candidates for a matrix of SHAPES."""
    if rows == 1:
        cuts = [(4, 512, 1, 4), (8, 512, 3, 4), (4, 512, 4, 2), (8, 256, 4, 2), (16, 256, 4, 4)]
        return [
            Tile(n, k, stages=stages, warps=warps, lines=lines, gemv=True)
            for n, k, stages, warps in cuts
            for lines in (0, 8)
        ]
    tiles = []
    fewer = name == "gate_up"  # two matrices share the memory
    for splits in [1] if name in ("gate_up", "head") else [1, 4] if name in ("qkv", "o") else [4, 8]:
        for n, k, stages, warps in [(32, 128, 5, 4), (16, 256, 4, 2)] if rows <= 16 else []:
            tiles.append(Tile(n, k, splits, stages - fewer, warps))
        for n, k, stages, warps in [(64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 5, 8), (64, 256, 3, 4)]:
            for tma in (False, True):
                tiles.append(Tile(n, k, splits, stages - fewer, warps, transposed=True, tma=tma))
    return tiles


def gemm_runs(name: str, rows: int, sets: int) -> dict[str, Run]:
    n, k = SHAPES[name]
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(sets)]
    x = torch.randn(rows, k, device="cuda").bfloat16()

    def library(i: int) -> Tensor:
        y = F.linear(x, weights[i % sets])
        return swiglu(y) if name == "gate_up" else y

    def ours(tile: Tile, i: int) -> Tensor:
        return skinny_triton(x, weights[i % sets], None, tile, swiglu=name == "gate_up")

    return {"cuBLAS": library, **{str(tuple(t)): partial(ours, t) for t in gemm_tiles(name, rows)}}


def paged(
    sequences: int, context: int, queries: int, sets: int, kv_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, list[Tensor], AttentionBatch]:
    pages = -(-context // 16)
    shape = (2, sequences * pages + 1, 4, 16, 128)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kv_dtype) for _ in range(sets)]
    tables = (torch.randperm(sequences * pages, device="cuda") + 1).int().view(sequences, pages)
    starts = torch.arange(0, sequences * queries + 1, queries, device="cuda", dtype=torch.int32)
    lengths = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
    decodes = sequences if queries == 1 else 0
    q = torch.randn(sequences * queries, 28, 128, device="cuda", dtype=torch.bfloat16)
    return q, caches, AttentionBatch(starts, starts, tables, lengths, starts, decodes, queries, context)


def decode_runs(sequences: int, context: int, sets: int, kv_dtype: torch.dtype) -> dict[str, Run]:
    q, caches, batch = paged(sequences, context, 1, sets, kv_dtype)
    out = torch.empty_like(q)

    def run(tile: DecodeTile, splits: int | None, i: int) -> None:
        k, v = caches[i % sets]
        decode_attention_triton(q, k, v, batch, 0.088, 0, out, splits=splits, tile=tile)

    candidates = itertools.product(DECODE_TILES, (None, 1, 2, 4, 33, 66))
    return {f"{tuple(tile)} splits {splits}": partial(run, tile, splits) for tile, splits in candidates}


def prefill_runs(sequences: int, context: int, queries: int) -> dict[str, Run]:
    q, ((k, v),), batch = paged(sequences, context, queries, 1)
    out = torch.empty_like(q)

    def dense(tile: DenseTile, _: int) -> None:
        dense_attention_triton(q, k, v, batch, 0.088, 0, out, tile)

    def pages(_: int) -> None:
        prefill_attention_triton(q, k, v, batch, 0.088, 0, out)

    def chosen(_: int) -> None:
        dense_attention(q, k, v, batch, 0.088, 0, out)

    return {
        "by pages": pages,
        "as served": chosen,
        **{f"dense {tuple(tile)}": partial(dense, tile) for tile in DENSE_TILES},
    }


def compile_all(
    runs: Callable[..., dict[str, Run]], arguments: tuple[Any, ...], part: int, parts: int
) -> None:
    """Run a part of the candidates once, in a process of its own: compiled kernels are cached for all."""
    for run in list(runs(*arguments).values())[part::parts]:
        try:
            run(0)
        except Exception:
            continue  # `rank` will say why
    torch.cuda.synchronize()


def main() -> None:
    kinds = sys.argv[1:] or ["gemm", "decode", "decode-fp8", "prefill"]
    decodes = [(kind, kv_dtype) for kind, kv_dtype in KV_DTYPES.items() if kind in kinds]
    jobs: list[tuple[Any, ...]] = []
    if "gemm" in kinds:
        jobs += [(gemm_runs, (n, m, 1), part, 2) for n in SHAPES for m in ROWS for part in range(2)]
    for _, kv_dtype in decodes:
        jobs += [(decode_runs, (s, 64, 1, kv_dtype), part, 4) for s in (1, 8) for part in range(4)]
    if "prefill" in kinds:
        jobs += [(prefill_runs, (s, 256, 256), part, 3) for s in (1, 2) for part in range(3)]
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.starmap(compile_all, jobs, 1)
    for name, rows in itertools.product(SHAPES, ROWS) if "gemm" in kinds else ():
        size = 2 * SHAPES[name][0] * SHAPES[name][1]
        sets = min(16, BETWEEN // size + 1)
        rank(f"{name} {rows}", size / BANDWIDTH, gemm_runs(name, rows, sets), 2 * sets)
    for (kind, kv_dtype), (sequences, context) in itertools.product(decodes, DECODE):
        size = sequences * context * 1024 * kv_dtype.itemsize
        sets = min(16, BETWEEN // size + 1)
        runs = decode_runs(sequences, context, sets, kv_dtype)
        rank(f"{kind} {sequences} x {context}", size / BANDWIDTH, runs, 2 * sets)
    for sequences, context, queries in PREFILL if "prefill" in kinds else ():
        flops = 4 * 128 * 28 * sequences * queries * (context - queries / 2)
        runs = prefill_runs(sequences, context, queries)
        rank(f"prefill {sequences} x {context}, {queries} rows", flops / 750e6, runs, 4)


if __name__ == "__main__":
    main()
