"""Decode attention on a CPU: `attention_cpu.py`'s decodes, compiled; keys and values are read where they lie.

A task is a KV head of a sequence: its group of query heads goes over BLOCK positions at a time with a running
maximum (Milakov & Gimelshein 2018, arXiv:1805.02867), so no memory grows with a context. Whichever thread is
free takes the next task; results depend neither on that nor on what else is in the batch.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kernels.cpu import LANES
from kernels.cpu_jit import F32, I32, I64, PTR, V8, Module, at, constant, exp, loop, math, splat, stack, total

BLOCK = 2 * LANES  # positions
SUMS = 8  # vectors of a head that are summed in registers at a time
FIELDS = {
    "q": PTR, "q_row": I64, "q_head": I64, "k_cache": PTR, "v_cache": PTR, "page": I64, "head": I64,
    "slot": I64, "page_size": I64, "tables": PTR, "table": I64, "lengths": PTR, "out": PTR, "rows": I64,
    "kv_heads": I64, "window": I64, "scale": F32,
}  # fmt: skip


class Decode:
    """Builds the kernel `decode` for heads of `dim` elements, a multiple of LANES, `group` of them a KV head.

    Strides are in elements: q_row and q_head of q; page, head and slot of both caches; table of the block
    tables.
    """

    def __init__(self, module: Module, dim: int, group: int) -> None:
        self.module, self.dim, self.group = module, dim, group
        module.kernel("decode", FIELDS, self._part)

    def _part(self, b: Any, job: Any) -> None:
        sizes = {
            "q": self.group * self.dim,
            "scores": self.group * BLOCK,
            "maxima": self.group,
            "sums": self.group,
        }
        for name, size in sizes.items():
            setattr(job, f"{name}_here", stack(b, F32, size))
        job.offsets = stack(b, I64, BLOCK)
        head, task_of, done = (b.append_basic_block(name) for name in ("next", "task", "done"))
        b.branch(head)
        b.position_at_end(head)
        number = b.atomic_rmw("add", job.counter, I64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", number, b.mul(job.rows, job.kv_heads)), task_of, done)
        b.position_at_end(task_of)
        self._task(b, job, b.sdiv(number, job.kv_heads), b.srem(number, job.kv_heads))
        b.branch(head)
        b.position_at_end(done)

    def _task(self, b: Any, job: Any, row: Any, kv_head: Any) -> None:
        """KV head number `kv_head` of sequence number `row`."""
        first_head = b.mul(kv_head, I64(self.group))
        q = at(b, job.q, b.mul(row, job.q_row), b.mul(first_head, job.q_head))
        heads = b.mul(job.kv_heads, I64(self.group))
        out = at(b, job.out, b.mul(b.add(b.mul(row, heads), first_head), I64(self.dim)))
        scale = splat(b, job.scale)
        for g in range(self.group):
            for d in range(0, self.dim, LANES):
                value = self._load(b, q, b.mul(I64(g), job.q_head), I64(d))
                b.store(b.fmul(value, scale), at(b, job.q_here, I64(g * self.dim + d)), align=4)
                b.store(constant(0.0), at(b, out, I64(g * self.dim + d)), align=4)
            b.store(F32(-numbers.inf), at(b, job.maxima_here, I64(g)))
            b.store(F32(0.0), at(b, job.sums_here, I64(g)))
        length = b.sext(b.load(at(b, job.lengths, row, of=I32), typ=I32), I64)
        unseen = b.sub(length, job.window)
        limited = b.and_(b.icmp_signed(">", job.window, I64(0)), b.icmp_signed(">", unseen, I64(0)))
        first = b.select(limited, unseen, I64(0))
        table = at(b, job.tables, b.mul(row, job.table), of=I32)
        shift = b.mul(kv_head, job.head)
        keys, values = at(b, job.k_cache, shift), at(b, job.v_cache, shift)
        count = b.sub(length, first)

        def block(i: Any) -> None:
            start = b.mul(i, I64(BLOCK))
            rest = b.sub(count, start)
            here = b.select(b.icmp_signed("<", rest, I64(BLOCK)), rest, I64(BLOCK))
            self._offsets(b, job, table, b.add(first, start), here)
            self._scores(b, job, keys, here)
            factors = [self._weights(b, job, g) for g in range(self.group)]
            for g, factor in enumerate(factors):
                for d in range(0, self.dim, SUMS * LANES):
                    self._sum(
                        b, job, values, here, out, g, range(d, min(d + SUMS * LANES, self.dim), LANES), factor
                    )

        loop(b, b.sdiv(b.add(count, I64(BLOCK - 1)), I64(BLOCK)), block)
        with b.if_then(b.icmp_signed(">", count, I64(0))):
            for g in range(self.group):
                inverse = splat(b, b.fdiv(F32(1.0), b.load(at(b, job.sums_here, I64(g)), typ=F32)))
                for d in range(0, self.dim, LANES):
                    value = self._load(b, out, I64(g * self.dim + d))
                    b.store(b.fmul(value, inverse), at(b, out, I64(g * self.dim + d)), align=4)

    def _load(self, b: Any, base: Any, *elements: Any) -> Any:
        return b.load(at(b, base, *elements), typ=V8, align=4)

    def _offsets(self, b: Any, job: Any, table: Any, first: Any, count: Any) -> None:
        """Where the keys, and the values, of the positions from `first` lie in the caches."""

        def position(i: Any, page: Any, place: Any) -> list[Any]:
            number = b.sext(b.load(at(b, table, page, of=I32), typ=I32), I64)
            offset = b.add(b.mul(number, job.page), b.mul(place, job.slot))
            b.store(offset, at(b, job.offsets, i, of=I64))
            place = b.add(place, I64(1))
            full = b.icmp_signed("==", place, job.page_size)
            return [b.select(full, b.add(page, I64(1)), page), b.select(full, I64(0), place)]

        loop(b, count, position, b.sdiv(first, job.page_size), b.srem(first, job.page_size))

    def _scores(self, b: Any, job: Any, keys: Any, count: Any) -> None:
        for i in range(0, self.group * BLOCK, LANES):
            b.store(constant(-numbers.inf), at(b, job.scores_here, I64(i)), align=4)

        def position(i: Any) -> None:
            key = at(b, keys, b.load(at(b, job.offsets, i, of=I64), typ=I64))
            sums = [constant(0.0)] * self.group
            for d in range(0, self.dim, LANES):
                value = self._load(b, key, I64(d))
                sums = [
                    math(
                        self.module,
                        b,
                        "fma",
                        self._load(b, job.q_here, I64(g * self.dim + d)),
                        value,
                        sums[g],
                    )
                    for g in range(self.group)
                ]
            for g in range(self.group):
                b.store(total(self.module, b, sums[g]), at(b, job.scores_here, I64(g * BLOCK), i))

        loop(b, count, position)

    def _weights(self, b: Any, job: Any, g: int) -> Any:
        """A block's scores of head g to weights, beside the new maximum; by how much it scales what came
        before."""
        places = [at(b, job.scores_here, I64(g * BLOCK + i)) for i in range(0, BLOCK, LANES)]
        scores = [b.load(place, typ=V8, align=4) for place in places]
        maximum = at(b, job.maxima_here, I64(g))
        old = b.load(maximum, typ=F32)
        new = math(
            self.module,
            b,
            "maxnum",
            old,
            total(self.module, b, math(self.module, b, "maxnum", *scores), "fmax"),
        )
        b.store(new, maximum)
        weights = [exp(self.module, b, b.fsub(score, splat(b, new))) for score in scores]
        for weight, place in zip(weights, places):
            b.store(weight, place, align=4)
        factor = exp(self.module, b, splat(b, b.fsub(old, new)))
        place = at(b, job.sums_here, I64(g))
        before = b.fmul(b.load(place, typ=F32), b.extract_element(factor, I32(0)))
        b.store(b.fadd(before, total(self.module, b, b.fadd(*weights))), place)
        return factor

    def _sum(
        self, b: Any, job: Any, values: Any, count: Any, out: Any, g: int, dims: range, factor: Any
    ) -> None:
        """out = out * factor + weights times values, over some of the elements of head g."""
        places = [at(b, out, I64(g * self.dim + d)) for d in dims]

        def position(i: Any, *sums: Any) -> list[Any]:
            value = at(b, values, b.load(at(b, job.offsets, i, of=I64), typ=I64))
            weight = splat(b, b.load(at(b, job.scores_here, I64(g * BLOCK), i), typ=F32))
            return [
                math(self.module, b, "fma", weight, self._load(b, value, I64(d)), total)
                for d, total in zip(dims, sums)
            ]

        before = [b.fmul(b.load(place, typ=V8, align=4), factor) for place in places]
        for place, after in zip(places, loop(b, count, position, *before)):
            b.store(after, place, align=4)


@lru_cache
def decode(dim: int, group: int) -> Callable[..., None]:
    """The kernel for these heads, compiled at the first call."""
    module = Module("cpu_decode")
    Decode(module, dim, group)
    return module.compile().function("decode")
