"""RMSNorm of rows on a CPU: `norm.py`, compiled."""

from __future__ import annotations

from typing import Any

from kernels.cpu import LANES
from kernels.cpu_jit import F32, I64, PTR, V8, Module, at, constant, loop, math, share, splat, total

FIELDS = {"x": PTR, "x_stride": I64, "weight": PTR, "y": PTR, "rows": I64, "hidden": I64, "eps": F32}


def add_rms_norm(module: Module) -> None:
    """The kernel `rms_norm`; hidden must be a multiple of LANES, the rows of y contiguous."""

    def part(b: Any, job: Any) -> None:
        first, count = share(module, b, job.rows)
        vectors = b.sdiv(job.hidden, I64(LANES))

        def row(i: Any) -> None:
            i = b.add(first, i)
            x, y = at(b, job.x, b.mul(i, job.x_stride)), at(b, job.y, b.mul(i, job.hidden))

            def square(j: Any, *sums: Any) -> list[Any]:
                value = b.load(at(b, x, b.mul(j, I64(LANES))), typ=V8, align=4)
                return [math(module, b, "fma", value, value, sums[0])]

            (squares,) = loop(b, vectors, square, constant(0.0))
            mean = b.fdiv(total(module, b, squares), b.sitofp(job.hidden, F32))
            root = math(module, b, "sqrt", b.fadd(mean, job.eps))
            inverse = splat(b, b.fdiv(F32(1.0), root))

            def scale(j: Any) -> None:
                at_j = b.mul(j, I64(LANES))
                value, weight = (b.load(at(b, p, at_j), typ=V8, align=4) for p in (x, job.weight))
                b.store(b.fmul(b.fmul(value, inverse), weight), at(b, y, at_j), align=4)

            loop(b, vectors, scale)

        loop(b, count, row)

    module.kernel("rms_norm", FIELDS, part)
