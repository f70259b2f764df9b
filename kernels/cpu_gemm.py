"""y = x Wᵀ in float32 for few rows of x on a CPU, and what follows it: y += x Wᵀ, or SwiGLU of both halves.

W is read in the order in which it lies in memory: panels of two vectors' columns, [N / P, K, P]. A tile of
rows x P sums stays in registers while K goes by (Goto & van de Geijn 2008, "Anatomy of high-performance
matrix multiplication", without its packing of x: there is little of it); meanwhile the panel that comes next
is fetched into the cache, evenly over all tiles of this one. Each sum is one chain of fused multiply-adds in
the order of k, whatever the rows beside it: a row's result doesn't depend on how many there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu_jit import (
    F32,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Module,
    at,
    ceil_div,
    constant,
    even,
    exp,
    loop,
    math,
    share,
    splat,
    stack,
)

STORE, ADD, SWIGLU = 0, 1, 2  # mode
LINE = 64  # bytes of a cache line
L2 = 2  # llvm.prefetch's locality
CHUNK = 65536  # elements of x that are used with one panel before the next, so that they stay in the cache
FIELDS = {
    "x": PTR, "x_stride": I64, "panels": PTR, "y": PTR, "y_stride": I64,
    "rows": I64, "columns": I64, "inner": I64, "mode": I64,
}  # fmt: skip


class Gemm:
    """Builds the kernel `product` for vectors of so many float32 `lanes` and so many `registers` of them."""

    def __init__(self, module: Module, lanes: int, registers: int) -> None:
        self.lanes, self.vector = lanes, ir.VectorType(F32, lanes)
        self.width = 2 * lanes  # of a panel
        self.most_rows = (registers - 4) // 2  # of a tile: two sums each, beside W's two vectors and x's one
        self.module = module
        self.tiles = [self._tile(rows) for rows in range(1, self.most_rows + 1)]
        self.module.kernel("product", FIELDS, self._part)

    def _tile(self, rows: int) -> Any:
        """tile(x, x_stride, panel, inner, ahead, step, y, y_stride, mode) of `rows` x one panel."""
        tile, b = self.module.function(f"tile{rows}", PTR, I64, PTR, I64, PTR, I64, PTR, I64, I64)
        tile.attributes.add("noinline")
        x, x_stride, panel, inner, ahead, step, y, y_stride, mode = tile.args
        x_rows = [at(b, x, b.mul(x_stride, I64(i))) for i in range(rows)]
        prefetch = self.module.external("llvm.prefetch.p0", VOID, PTR, I32, I32, I32)

        def multiply(k: Any, *sums: Any) -> list[Any]:
            places = [at(b, panel, b.mul(k, I64(self.width)), I64(self.lanes * j)) for j in range(2)]
            w = [b.load(place, typ=self.vector, align=4 * self.lanes) for place in places]
            line = at(b, ahead, b.mul(k, step), of=I8)
            for j in range(0, 4 * self.width, LINE):
                b.call(prefetch, [at(b, line, I64(j), of=I8), I32(0), I32(L2), I32(1)])
            result = []
            for i, x_row in enumerate(x_rows):
                value = splat(b, b.load(at(b, x_row, k), typ=F32), self.vector)
                result += [math(self.module, b, "fma", value, w[j], sums[2 * i + j]) for j in range(2)]
            return result

        sums = loop(b, inner, multiply, *[constant(0.0, self.vector)] * (2 * rows))
        done = b.append_basic_block("done")
        switch = b.switch(mode, done)
        for value, finish in ((STORE, self._store), (ADD, self._add), (SWIGLU, self._swiglu)):
            with b.goto_block(block := b.append_basic_block("finish")):
                for i in range(rows):
                    finish(b, sums[2 * i : 2 * i + 2], at(b, y, b.mul(y_stride, I64(i))))
                b.branch(done)
            switch.add_case(value, block)
        b.position_at_end(done)
        b.ret_void()
        return tile

    def _store(self, b: Any, sums: list[Any], y: Any) -> None:
        for j, value in enumerate(sums):
            b.store(value, at(b, y, I64(self.lanes * j)), align=4)

    def _add(self, b: Any, sums: list[Any], y: Any) -> None:
        old = [b.load(at(b, y, I64(self.lanes * j)), typ=self.vector, align=4) for j in range(2)]
        self._store(b, [b.fadd(a, c) for a, c in zip(old, sums)], y)

    def _swiglu(self, b: Any, sums: list[Any], y: Any) -> None:
        gate, up = sums
        power = exp(self.module, b, b.fneg(gate))
        self._store(b, [b.fmul(b.fdiv(gate, b.fadd(power, constant(1.0, self.vector))), up)], y)

    def _part(self, b: Any, job: Any) -> None:
        """One thread's panels."""
        gated = b.icmp_signed("==", job.mode, I64(SWIGLU))
        width = b.select(gated, I64(self.lanes), I64(self.width))  # of what a panel makes of y
        first, count = share(self.module, b, ceil_div(b, job.columns, width))
        scratch = stack(b, F32, self.most_rows * self.width)
        most = ceil_div(b, I64(CHUNK), job.inner)
        chunks = ceil_div(b, job.rows, most)
        size = b.mul(job.inner, I64(self.width))

        def chunk(c: Any) -> None:
            begin, height = even(b, job.rows, chunks, c)
            tiles = ceil_div(b, height, I64(self.most_rows))
            step = ceil_div(b, I64(4 * self.width), tiles)

            def panel(p: Any) -> None:
                weights = at(b, job.panels, b.mul(b.add(p, first), size))
                column = b.mul(b.add(p, first), width)
                rest = b.sub(job.columns, column)
                whole = b.icmp_signed(">=", rest, width)

                def tile(t: Any) -> None:
                    start, rows = even(b, height, tiles, t)
                    row = b.add(begin, start)
                    ahead = at(b, at(b, weights, size), b.mul(b.mul(t, step), job.inner), of=I8)
                    y = at(b, job.y, b.mul(row, job.y_stride), column)
                    self._call_tile(b, rows, [
                        at(b, job.x, b.mul(row, job.x_stride)), job.x_stride, weights, job.inner, ahead, step,
                        b.select(whole, y, scratch), b.select(whole, job.y_stride, I64(self.width)),
                        b.select(b.or_(whole, gated), job.mode, I64(STORE)),
                    ])  # fmt: skip
                    with b.if_then(b.not_(whole), likely=False):
                        add = b.icmp_signed("==", job.mode, I64(ADD))
                        self._copy(b, scratch, y, rows, rest, job.y_stride, add)

                loop(b, tiles, tile)

            loop(b, count, panel)

        loop(b, chunks, chunk)

    def _call_tile(self, b: Any, rows: Any, arguments: list[Any]) -> None:
        done = b.append_basic_block("after")
        switch = b.switch(rows, done)
        for i, tile in enumerate(self.tiles):
            with b.goto_block(block := b.append_basic_block("call")):
                b.call(tile, arguments)
                b.branch(done)
            switch.add_case(i + 1, block)
        b.position_at_end(done)

    def _copy(self, b: Any, scratch: Any, y: Any, rows: Any, columns: Any, stride: Any, add: Any) -> None:
        """The first columns of the tile in `scratch` to y, or added to it: where y ends within a panel."""

        def row(i: Any) -> None:
            def element(j: Any) -> None:
                place = at(b, y, b.mul(i, stride), j)
                value = b.load(at(b, scratch, b.mul(i, I64(self.width)), j), typ=F32)
                b.store(b.fadd(value, b.select(add, b.load(place, typ=F32), F32(-0.0))), place)

            loop(b, columns, element)

        loop(b, rows, row)
