"""Which tiles are fastest on this card: times candidates for the skinny products and attention.

python -m bench.tune_kernels [gemm] [decode] [prefill]
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_decode import Tile as DecodeTile
from kernels.attention_decode import decode_attention_triton
from kernels.attention_dense import Tile as DenseTile
from kernels.attention_dense import dense_attention_triton
from kernels.attention_prefill import prefill_attention_triton
from kernels.batch import AttentionBatch
from kernels.gemm_skinny import Tile, skinny_triton
from kernels.swiglu import swiglu

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944), "head": (152064, 3584)}  # fmt: skip
BETWEEN = 1 << 29  # bytes read between two reads of the same line


def graph_us(run: Callable[[int], Any], calls: int) -> float:
    """Microseconds a call in a graph of `calls` calls; median of several replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                run(i)
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


def gemm_tiles(name: str, rows: int) -> list[Tile]:
    wide = name in ("gate_up", "head")
    tiles = []
    if rows == 1:
        for bn, bk, st, w in [(4, 512, 1, 4), (8, 512, 1, 4), (4, 512, 4, 4), (8, 512, 3, 4), (4, 512, 4, 2), (8, 256, 4, 2)]:
            tiles.append(Tile(bn, bk, 1, st, w, False, min(8, 64), True))
    mma = [(16, 256, 4, 2), (32, 128, 5, 4), (32, 256, 4, 4), (64, 128, 4, 4), (16, 512, 3, 4)]
    if rows > 16:
        mma = [(32, 128, 5, 4), (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 5, 4)]
    for bn, bk, st, w in mma:
        for splits in ([1] if wide else [1, 2, 4] if bn <= 32 else [4, 8]):
            tiles.append(Tile(bn, bk, splits, st if not (wide and name == "gate_up") else max(2, st - 1), w))
    for bn, bk, st, w in [(64, 128, 4, 4), (64, 256, 3, 4), (128, 64, 4, 8), (128, 128, 3, 8)]:
        for splits in [1] if wide else [4, 8] if bn == 64 else [8]:
            if name == "gate_up" and bn * bk > 8192:
                st = 2
            tiles.append(Tile(bn, bk, splits, st, w, True))
    return tiles


def gemm_case(name: str, rows: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    n, k = SHAPES[name]
    count = min(16, BETWEEN // (2 * n * k) + 1)
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.02 for _ in range(count)]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16, generator=generator)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if name == "qkv" else None
    return weights, x, bias


def gemm(names: list[str], all_rows: list[int]) -> None:
    for name, rows in itertools.product(names, all_rows):
        weights, x, bias = gemm_case(name, rows)
        n, k = SHAPES[name]
        fused = name == "gate_up"
        want = x.double() @ weights[0].double().t() + (0 if bias is None else bias.double())
        if fused:
            gate, up = want.chunk(2, 1)
            want = F.silu(gate) * up
        plain = (lambda i: swiglu(F.linear(x, weights[i % len(weights)]))) if fused else (
            lambda i: F.linear(x, weights[i % len(weights)], bias)
        )
        calls = 2 * len(weights)
        results = [(graph_us(plain, calls), "cuBLAS")]
        for tile in gemm_tiles(name, rows):
            try:
                y = skinny_triton(x, weights[0], bias, tile, fused)
                error = float((y.double() - want).norm() / want.norm())
                if not error < 5e-3:
                    print("WRONG", name, rows, tile, error)
                run = lambda i, t=tile: skinny_triton(x, weights[i % len(weights)], bias, t, fused)  # noqa: E731
                results.append((graph_us(run, calls), f"{tuple(tile)}"))
            except Exception as error:
                print("FAILED", name, rows, tile, str(error)[:80].replace("\n", " "))
        base = results[0][0]
        results.sort(key=lambda r: r[0])
        size = 2 * n * k / 1e6
        tops = "  ".join(f"{us:.1f} {what}" for us, what in results[:4])
        print(f"{name:8}{rows:4} cuBLAS {base:7.1f} us {size / base:.2f} TB/s | best {size / results[0][0]:.2f}: {tops}", flush=True)


def compile_gemm(job: tuple[str, int, int, int]) -> None:
    name, rows, part, parts = job
    n, k = SHAPES[name]
    x = torch.empty(rows, k, device="cuda", dtype=torch.bfloat16)
    w = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    bias = torch.empty(n, device="cuda", dtype=torch.bfloat16) if name == "qkv" else None
    for tile in gemm_tiles(name, rows)[part::parts]:
        try:
            skinny_triton(x, w, bias, tile, name == "gate_up")
        except Exception:
            pass


def paged(batch: int, context: int, pools: int, queries: int = 1) -> tuple[Tensor, list[Tensor], AttentionBatch]:
    pages = -(-context // 16)
    cache = [torch.randn(2, batch * pages + 1, 4, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(pools)]
    tables = (torch.randperm(batch * pages, device="cuda") + 1).int().view(batch, pages)
    q = torch.randn(batch * queries, 28, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(0, batch * queries + 1, queries, device="cuda", dtype=torch.int32)
    lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    decodes = batch if queries == 1 else 0
    return q, cache, AttentionBatch(starts, starts, tables, lens, starts, decodes, queries, context)


DECODE_TILES = [(64, 4, 3), (64, 4, 4), (64, 4, 5), (32, 4, 5), (32, 2, 5), (32, 4, 7), (32, 1, 5), (128, 4, 3), (128, 8, 3), (64, 8, 4), (64, 2, 4), (16, 1, 7)]  # fmt: skip


def decode(cases: list[tuple[int, int]]) -> None:
    for batch, context in cases:
        size = batch * context * 2048
        q, cache, layout = paged(batch, context, min(16, BETWEEN // size + 1))
        want = None
        results = []
        out = torch.empty_like(q)
        for raw in DECODE_TILES:
            tile = DecodeTile(*raw)
            for splits in (None,) if batch > 1 else (None, 128):
                try:
                    decode_attention_triton(q, *cache[0], layout, 0.088, 0, out, splits, tile)
                    if want is None:
                        want = out.clone()
                    error = float((out.float() - want.float()).norm() / want.float().norm())
                    if not error < 5e-3:
                        print("WRONG", tile, error)
                    run = lambda i, t=tile, s=splits: decode_attention_triton(q, *cache[i % len(cache)], layout, 0.088, 0, out, s, t)  # noqa: E731, E501
                    results.append((graph_us(run, 2 * len(cache)), f"{raw} {splits or ''}"))
                except Exception as error:
                    print("FAILED", tile, str(error)[:80])
        results.sort()
        print(f"decode b{batch} c{context}: " + "  ".join(f"{size / us / 1e6:.2f} TB/s ({us:.0f}) {what}" for us, what in results), flush=True)


def compile_decode(raw: tuple[int, int, int]) -> None:
    for batch, context in ((2, 128), (600, 16)):
        q, cache, layout = paged(batch, context, 1)
        try:
            decode_attention_triton(q, *cache[0], layout, 0.088, 0, torch.empty_like(q), None, DecodeTile(*raw))
        except Exception:
            pass


DENSE_TILES = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)]
PAGED_TILES = [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 4), (128, 32, 8, 5), (64, 64, 4, 3), (128, 128, 8, 3)]


def prefill_runs(batch: int, context: int, queries: int) -> list[tuple[str, Callable[[int], Any], Tensor]]:
    from kernels import attention_prefill

    q, cache, layout = paged(batch, context, 1, queries)
    out = torch.empty_like(q)
    runs = []

    def by_pages(i: int, raw: Any) -> None:
        attention_prefill._blocks = lambda *_: raw
        prefill_attention_triton(q, *cache[0], layout, 0.088, 0, out)

    for raw in PAGED_TILES:
        runs.append((f"paged {raw}", lambda i, r=raw: by_pages(i, r), out))
    for raw in DENSE_TILES:
        runs.append((f"dense {raw}", lambda i, r=raw: dense_attention_triton(q, *cache[0], layout, 0.088, 0, out, DenseTile(*r)), out))
    return runs


def prefill(cases: list[tuple[int, int, int]]) -> None:
    for batch, context, queries in cases:
        flops = 4 * 128 * 28 * batch * (queries * (context - queries) + queries * (queries + 1) / 2)
        results, want = [], None
        for name, run, out in prefill_runs(batch, context, queries):
            try:
                out.fill_(float("nan"))
                run(0)
                if want is None:
                    want = out.clone()
                error = float((out.float() - want.float()).norm() / want.float().norm())
                if not error < 5e-3:
                    print("WRONG", name, error)
                results.append((graph_us(run, 4), name))
            except Exception as error:
                print("FAILED", name, str(error)[:100])
        if batch == 1 and context == queries:
            q = torch.randn(1, 28, queries, 128, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn_like(q) for _ in range(2))
            for kind in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                try:
                    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kind)):
                        results.append((graph_us(lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True), 4), kind))
                except Exception as error:
                    print("FAILED", kind, str(error)[:100])
        results.sort()
        print(f"prefill b{batch} c{context} q{queries}: " + "  ".join(f"{flops / us / 1e6:.0f} TF ({us:.0f}) {what}" for us, what in results), flush=True)


def compile_prefill(place: int) -> None:
    runs = prefill_runs(1, 256, 128) + prefill_runs(2, 256, 128)
    half = len(runs) // 2
    for i in (place, place + half):
        try:
            runs[i][1](0)
        except Exception:
            pass


def main() -> None:
    kinds = sys.argv[1:] or ["gemm", "decode", "prefill"]
    rows = [1, 8, 32, 64]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        waits = []
        if "gemm" in kinds:
            waits.append(pool.map_async(compile_gemm, [(n, m, i, 3) for n in SHAPES for m in rows for i in range(3)], 1))
        if "decode" in kinds:
            waits.append(pool.map_async(compile_decode, DECODE_TILES, 1))
        if "prefill" in kinds:
            waits.append(pool.map_async(compile_prefill, range(len(PAGED_TILES) + len(DENSE_TILES)), 1))
        for wait in waits:
            wait.get()
    print("compiled", flush=True)
    if "decode" in kinds:
        decode([(256, 512), (32, 4096), (128, 4096), (1, 4096), (1, 32768), (8, 512)])
    if "prefill" in kinds:
        prefill([(1, 8192, 8192), (1, 32000, 7424), (8, 1024, 1024)])
    if "gemm" in kinds:
        gemm(["gate_up", "down", "qkv", "o", "head"], rows)


if __name__ == "__main__":
    main()
