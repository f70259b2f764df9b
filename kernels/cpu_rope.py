"""Rotary embedding and the write into the cache on a CPU: `rope_cache.py`, compiled."""

from __future__ import annotations

from typing import Any

from kernels.cpu import LANES
from kernels.cpu_jit import I64, PTR, V8, Module, at, loop, math, share

FIELDS = {
    "q": PTR, "k": PTR, "row": I64, "head": I64, "v": PTR, "v_row": I64, "v_head": I64, "cos_sin": PTR,
    "positions": PTR, "slots": PTR,
    "k_cache": PTR, "v_cache": PTR, "page": I64, "cache_head": I64, "slot": I64, "page_size": I64,
    "rows": I64, "q_heads": I64, "kv_heads": I64, "dim": I64, "rotated": I64,
}  # fmt: skip


def add_rope_and_cache(module: Module) -> None:
    """The kernel `rope_and_cache`, which rotates q where it lies. Strides are in elements: row and head of q
    and k; page, cache_head and slot of both caches. Half of what is rotated, and dim, must be multiples of
    LANES."""

    def copy(b: Any, source: Any, target: Any, start: Any, stop: Any) -> None:
        def vector(j: Any) -> None:
            place = b.add(start, b.mul(j, I64(LANES)))
            b.store(b.load(at(b, source, place), typ=V8, align=4), at(b, target, place), align=4)

        loop(b, b.sdiv(b.sub(stop, start), I64(LANES)), vector)

    def rotate(b: Any, x: Any, y: Any, angles: Any, half: Any) -> None:
        def vector(j: Any) -> None:
            first = b.mul(j, I64(LANES))
            second = b.add(first, half)
            x1, x2 = (b.load(at(b, x, place), typ=V8, align=4) for place in (first, second))
            cos, sin = (b.load(at(b, angles, place), typ=V8, align=4) for place in (first, second))
            y1 = math(module, b, "fma", x1, cos, b.fneg(b.fmul(x2, sin)))
            y2 = math(module, b, "fma", x2, cos, b.fmul(x1, sin))
            b.store(y1, at(b, y, first), align=4)
            b.store(y2, at(b, y, second), align=4)

        loop(b, b.sdiv(half, I64(LANES)), vector)

    def part(b: Any, job: Any) -> None:
        first, count = share(module, b, job.rows)
        half = b.sdiv(job.rotated, I64(2))

        def row(i: Any) -> None:
            i = b.add(first, i)
            q, k = (at(b, p, b.mul(i, job.row)) for p in (job.q, job.k))
            v = at(b, job.v, b.mul(i, job.v_row))
            position, slot = (b.load(at(b, p, i, of=I64), typ=I64) for p in (job.positions, job.slots))
            angles = at(b, job.cos_sin, b.mul(position, job.rotated))

            def query(h: Any) -> None:
                x = at(b, q, b.mul(h, job.head))
                rotate(b, x, x, angles, half)

            loop(b, job.q_heads, query)
            offset = b.add(
                b.mul(b.sdiv(slot, job.page_size), job.page), b.mul(b.srem(slot, job.page_size), job.slot)
            )

            def key_and_value(h: Any) -> None:
                x, value = at(b, k, b.mul(h, job.head)), at(b, v, b.mul(h, job.v_head))
                place = b.add(offset, b.mul(h, job.cache_head))
                key = at(b, job.k_cache, place)
                rotate(b, x, key, angles, half)
                copy(b, x, key, job.rotated, job.dim)
                copy(b, value, at(b, job.v_cache, place), I64(0), job.dim)

            with b.if_then(b.icmp_signed(">=", slot, job.page_size)):
                loop(b, job.kv_heads, key_and_value)

        loop(b, count, row)

    module.kernel("rope_and_cache", FIELDS, part)
