"""Decode attention on a CPU: `attention_cpu.py`'s decodes, compiled; keys and values are read where they lie.

A task is a KV head of a row, or of a few rows of the same sequence: its group of query heads goes over a
block of positions at a time with a running maximum (Milakov & Gimelshein 2018, arXiv:1805.02867), so no
memory grows with a context. Whichever thread is free takes the next task. A row's result depends neither on
that, nor on what else is in the batch, nor on how many rows a task has.

A row's work is bound by instructions while its keys and values come from a near cache: what is loaded is used
for several heads at once, and the lanes of four positions' products are summed together. A long context comes
from further away: the rows of a task go over it a segment at a time, one after the other.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from kernels.cpu import LANES, TASK_ROWS
from kernels.cpu_jit import (
    F32,
    I32,
    I64,
    PTR,
    Module,
    at,
    ceil_div,
    constant,
    exp,
    loop,
    math,
    splat,
    stack,
    total,
    vector_registers,
)

SUMS = 8  # vectors of a head that are summed in registers at a time
SEGMENT = 2**17  # elements of keys, and as many of values: half a MiB each, for an L2 cache of one MiB up
FOUR = 4  # positions whose scores are computed together
FIELDS = {
    "q": PTR, "q_row": I64, "q_head": I64, "k_cache": PTR, "v_cache": PTR, "page": I64, "head": I64,
    "slot": I64, "page_size": I64, "tables": PTR, "table": I64, "lengths": PTR, "out": PTR, "rows": I64,
    "task_rows": I64, "kv_heads": I64, "window": I64, "scale": F32,
}  # fmt: skip


class Decode:
    """Builds the kernel `decode` for heads of `dim` elements, a multiple of LANES, `group` of them a KV head,
    in vectors of `width` elements, of which there are `registers`.

    Strides are in elements: q_row and q_head of q; page, head and slot of both caches; table of the block
    tables. task_rows, up to TASK_ROWS: of several, each of a task's rows sees at least as many tokens as the
    one before.
    """

    def __init__(self, module: Module, dim: int, group: int, width: int, registers: int) -> None:
        self.module, self.dim, self.group, self.width = module, dim, group, width
        self.vector = ir.VectorType(F32, width)
        self.block = 2 * width  # positions
        self.segment = max(1, SEGMENT // (dim * self.block)) * self.block  # positions
        self.sums = registers // 2  # vectors that are summed at a time; the rest are for what is loaded
        module.kernel("decode", FIELDS, self._part)

    def _part(self, b: Any, job: Any) -> None:
        sizes = {
            "q": self.group * self.dim,
            "scores": self.group * self.block,
            "maxima": TASK_ROWS * self.group,
            "sums": TASK_ROWS * self.group,
        }
        for name, size in sizes.items():
            setattr(job, f"{name}_here", stack(b, F32, size))
        job.offsets = stack(b, I64, self.block)
        head, task_of, done = (b.append_basic_block(name) for name in ("next", "task", "done"))
        b.branch(head)
        b.position_at_end(head)
        number = b.atomic_rmw("add", job.counter, I64(1), "monotonic")
        tasks = b.mul(ceil_div(b, job.rows, job.task_rows), job.kv_heads)
        b.cbranch(b.icmp_signed("<", number, tasks), task_of, done)
        b.position_at_end(task_of)
        self._task(b, job, b.sdiv(number, job.kv_heads), b.srem(number, job.kv_heads))
        b.branch(head)
        b.position_at_end(done)

    def _task(self, b: Any, job: Any, task: Any, kv_head: Any) -> None:
        """KV head number `kv_head` of rows number `task` * task_rows and those behind it."""
        before = b.mul(task, job.task_rows)
        rest = b.sub(job.rows, before)
        count = b.select(b.icmp_signed("<", rest, job.task_rows), rest, job.task_rows)

        def row(i: Any) -> Any:
            return self._row(b, job, b.add(before, i), i, kv_head)

        loop(b, count, lambda i: self._begin(b, row(i)))
        start, _ = self._bounds(b, job, before)
        _, end = self._bounds(b, job, b.sub(b.add(before, count), I64(1)))
        start = b.sdiv(start, I64(self.segment))

        def segment(i: Any) -> None:
            first = b.mul(b.add(start, i), I64(self.segment))
            loop(b, count, lambda i: self._attend(b, row(i), first))

        loop(b, b.sub(ceil_div(b, end, I64(self.segment)), start), segment)
        loop(b, count, lambda i: self._end(b, row(i)))

    def _bounds(self, b: Any, job: Any, row: Any) -> tuple[Any, Any]:
        """The first position that a row sees, and the one behind the last."""
        length = b.sext(b.load(at(b, job.lengths, row, of=I32), typ=I32), I64)
        unseen = b.sub(length, job.window)
        limited = b.and_(b.icmp_signed(">", job.window, I64(0)), b.icmp_signed(">", unseen, I64(0)))
        return b.select(limited, unseen, I64(0)), length

    def _row(self, b: Any, job: Any, row: Any, place: Any, kv_head: Any) -> Any:
        """The job as row number `row`, the one at `place` in its task, sees it."""
        here = SimpleNamespace(**vars(job))
        first_head = b.mul(kv_head, I64(self.group))
        heads = b.mul(job.kv_heads, I64(self.group))
        here.q = at(b, job.q, b.mul(row, job.q_row), b.mul(first_head, job.q_head))
        here.out = at(b, job.out, b.mul(b.add(b.mul(row, heads), first_head), I64(self.dim)))
        here.table = at(b, job.tables, b.mul(row, job.table), of=I32)
        here.first, here.end = self._bounds(b, job, row)
        shift = b.mul(kv_head, job.head)
        here.keys, here.values = at(b, job.k_cache, shift), at(b, job.v_cache, shift)
        here.maxima_here, here.sums_here = (
            at(b, base, b.mul(place, I64(self.group))) for base in (job.maxima_here, job.sums_here)
        )
        return here

    def _begin(self, b: Any, row: Any) -> None:
        for g in range(self.group):
            for d in range(0, self.dim, self.width):
                b.store(constant(0.0, self.vector), at(b, row.out, I64(g * self.dim + d)), align=4)
            b.store(F32(-numbers.inf), at(b, row.maxima_here, I64(g)))
            b.store(F32(0.0), at(b, row.sums_here, I64(g)))

    def _attend(self, b: Any, row: Any, segment: Any) -> None:
        """To what the row sees of the segment from that position on."""
        scale = splat(b, row.scale, self.vector)
        for g in range(self.group):
            for d in range(0, self.dim, self.width):
                value = self._load(b, row.q, b.mul(I64(g), row.q_head), I64(d))
                b.store(b.fmul(value, scale), at(b, row.q_here, I64(g * self.dim + d)), align=4)
        behind = b.add(segment, I64(self.segment))
        first = b.select(b.icmp_signed(">", row.first, segment), row.first, segment)
        end = b.select(b.icmp_signed("<", row.end, behind), row.end, behind)
        count = b.sub(end, first)

        def block(i: Any) -> None:
            start = b.mul(i, I64(self.block))
            rest = b.sub(count, start)
            here = b.select(b.icmp_signed("<", rest, I64(self.block)), rest, I64(self.block))
            self._offsets(b, row, row.table, b.add(first, start), here)
            self._scores(b, row, row.keys, here)
            seen = self._seen(b, here)
            factors = [self._weights(b, row, g, seen) for g in range(self.group)]
            step = min(SUMS * self.width, self.dim)
            heads = max(1, self.sums * self.width // step)
            for g in range(0, self.group, heads):
                some = range(g, min(g + heads, self.group))
                for d in range(0, self.dim, step):
                    dims = range(d, min(d + step, self.dim), self.width)
                    self._sum(b, row, row.values, here, row.out, some, dims, factors)

        loop(b, ceil_div(b, count, I64(self.block)), block)

    def _end(self, b: Any, row: Any) -> None:
        with b.if_then(b.icmp_signed(">", row.end, I64(0))):
            for g in range(self.group):
                inverse = b.fdiv(F32(1.0), b.load(at(b, row.sums_here, I64(g)), typ=F32))
                inverse = splat(b, inverse, self.vector)
                for d in range(0, self.dim, self.width):
                    value = self._load(b, row.out, I64(g * self.dim + d))
                    b.store(b.fmul(value, inverse), at(b, row.out, I64(g * self.dim + d)), align=4)

    def _load(self, b: Any, base: Any, *elements: Any) -> Any:
        return b.load(at(b, base, *elements), typ=self.vector, align=4)

    def _offsets(self, b: Any, job: Any, table: Any, first: Any, count: Any) -> None:
        """Where the keys, and the values, of the positions from `first` lie in the caches; up to a multiple
        of FOUR the last of them again, so that nothing is read that the sequence never wrote."""

        def position(i: Any, page: Any, place: Any) -> list[Any]:
            number = b.sext(b.load(at(b, table, page, of=I32), typ=I32), I64)
            offset = b.add(b.mul(number, job.page), b.mul(place, job.slot))
            b.store(offset, at(b, job.offsets, i, of=I64))
            place = b.add(place, I64(1))
            full = b.icmp_signed("==", place, job.page_size)
            return [b.select(full, b.add(page, I64(1)), page), b.select(full, I64(0), place)]

        loop(b, count, position, b.sdiv(first, job.page_size), b.srem(first, job.page_size))
        last = b.load(at(b, job.offsets, b.sub(count, I64(1)), of=I64), typ=I64)
        behind = b.srem(b.sub(I64(self.block), count), I64(FOUR))
        loop(b, behind, lambda i: b.store(last, at(b, job.offsets, count, i, of=I64)) and None)

    def _scores(self, b: Any, job: Any, keys: Any, count: Any) -> None:
        """Of `count` positions, up to a multiple of FOUR, for each head."""
        step = self.sums // FOUR

        def four(i: Any) -> None:
            first = b.mul(i, I64(FOUR))
            places = [
                at(b, keys, b.load(at(b, job.offsets, first, I64(n), of=I64), typ=I64)) for n in range(FOUR)
            ]
            for start in range(0, self.group, step):
                heads = range(start, min(start + step, self.group))
                sums = [[constant(0.0, self.vector)] * FOUR for _ in heads]
                for d in range(0, self.dim, self.width):
                    values = [self._load(b, place, I64(d)) for place in places]
                    for n, g in enumerate(heads):
                        q = self._load(b, job.q_here, I64(g * self.dim + d))
                        sums[n] = [
                            math(self.module, b, "fma", q, value, before)
                            for value, before in zip(values, sums[n])
                        ]
                for n, g in enumerate(heads):
                    b.store(
                        self._totals(b, sums[n]),
                        at(b, job.scores_here, I64(g * self.block), first),
                        align=4,
                    )

        loop(b, ceil_div(b, count, I64(FOUR)), four)

    def _totals(self, b: Any, vectors: list[Any]) -> Any:
        """The sums of the lanes of FOUR vectors, as one of FOUR lanes."""

        def shuffled(x: Any, y: Any, lanes: list[int]) -> Any:
            """`lanes` of each quarter of x (0 to 3) and y (4 to 7)."""
            quarters = range(0, x.type.count, FOUR)
            mask = [
                quarter + lane % FOUR + x.type.count * (lane // FOUR)
                for quarter in quarters
                for lane in lanes
            ]
            return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(mask)), mask))

        def halved(x: Any, y: Any) -> Any:
            return b.fadd(shuffled(x, y, [0, 4, 1, 5]), shuffled(x, y, [2, 6, 3, 7]))

        x, y = halved(*vectors[:2]), halved(*vectors[2:])
        sums = b.fadd(shuffled(x, y, [0, 1, 4, 5]), shuffled(x, y, [2, 3, 6, 7]))
        while (half := sums.type.count // 2) >= FOUR:
            low, high = (
                b.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(I32, half), list(lanes)))
                for lanes in (range(half), range(half, 2 * half))
            )
            sums = b.fadd(low, high)
        return sums

    def _seen(self, b: Any, count: Any) -> list[Any]:
        """For each vector of a block's scores, which are of its first `count` positions."""
        whole = ir.VectorType(I32, self.width)
        end = splat(b, b.trunc(count, I32), whole)
        places = [list(range(i, i + self.width)) for i in range(0, self.block, self.width)]
        return [b.icmp_signed("<", ir.Constant(whole, place), end) for place in places]

    def _weights(self, b: Any, job: Any, g: int, seen: list[Any]) -> Any:
        """A block's scores of head g to weights, beside the new maximum; by how much it scales what came
        before."""
        starts = range(0, self.block, self.width)
        places = [at(b, job.scores_here, I64(g * self.block + i)) for i in starts]
        hidden = constant(-numbers.inf, self.vector)
        scores = [
            b.select(there, b.load(place, typ=self.vector, align=4), hidden)
            for there, place in zip(seen, places)
        ]
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
        weights = [exp(self.module, b, b.fsub(score, splat(b, new, self.vector))) for score in scores]
        for weight, place in zip(weights, places):
            b.store(weight, place, align=4)
        factor = exp(self.module, b, splat(b, b.fsub(old, new), self.vector))
        place = at(b, job.sums_here, I64(g))
        before = b.fmul(b.load(place, typ=F32), b.extract_element(factor, I32(0)))
        b.store(b.fadd(before, total(self.module, b, b.fadd(*weights))), place)
        return factor

    def _sum(
        self,
        b: Any,
        job: Any,
        values: Any,
        count: Any,
        out: Any,
        heads: range,
        dims: range,
        factors: list[Any],
    ) -> None:
        """out = out * factor + weights times values, over some of the elements of some heads."""
        places = [at(b, out, I64(g * self.dim + d)) for g in heads for d in dims]

        def position(i: Any, *sums: Any) -> list[Any]:
            row = at(b, values, b.load(at(b, job.offsets, i, of=I64), typ=I64))
            parts = [self._load(b, row, I64(d)) for d in dims]
            weights = [
                splat(b, b.load(at(b, job.scores_here, I64(g * self.block), i), typ=F32), self.vector)
                for g in heads
            ]
            products = [(weight, part) for weight in weights for part in parts]
            return [
                math(self.module, b, "fma", weight, part, before)
                for (weight, part), before in zip(products, sums)
            ]

        scales = [factors[g] for g in heads for _ in dims]
        before = [b.fmul(self._load(b, place), scale) for place, scale in zip(places, scales)]
        for place, after in zip(places, loop(b, count, position, *before)):
            b.store(after, place, align=4)


@lru_cache
def decode(dim: int, group: int) -> Callable[..., None]:
    """The kernel for these heads, compiled at the first call."""
    module = Module("cpu_decode")
    width, registers = vector_registers()
    Decode(module, dim, group, LANES if dim % width else width, registers)
    return module.compile().function("decode")
