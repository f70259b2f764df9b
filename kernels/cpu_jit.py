"""Kernels for CPUs: LLVM IR, built in Python and compiled at the start for the machine that runs it.

What this adds to llvmlite is loops, vectors, and torch's own threads: a pool of one's own would fight with
them for the cores. torch's OpenMP runtime is called as compilers do it (`GOMP_parallel`, libgomp's interface,
which LLVM's libomp has too), so these threads are awake from torch's operations, and the other way round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from kernels.cpu import LANES

F32, I8, I32, I64, PTR = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.PointerType()
VOID = ir.VoidType()
V8 = ir.VectorType(F32, LANES)

C_TYPES = {PTR: ctypes.c_void_p, I64: ctypes.c_int64, F32: ctypes.c_float}


class Unsupported(Exception):
    """Compiled kernels don't run here; the message says why."""


@lru_cache
def vector_registers() -> tuple[int, int]:
    """float32 lanes of the CPU's vectors, and how many registers of that size it has. Raises Unsupported
    where there is no fused multiply-add of vectors."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl"):
        return 16, 32
    if features.get("avx2") and features.get("fma"):
        return 8, 16
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        return 8, 16  # pairs of 32 registers of four
    raise Unsupported("the CPU has neither AVX2 with FMA nor NEON")


@lru_cache
def _share_openmp() -> None:
    """Make OpenMP's functions known, in the runtime that torch is linked with."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"torch's threads can't be shared: {error}") from error


class Module:
    """Kernels that are compiled together."""

    def __init__(self, name: str) -> None:
        self.ir = ir.Module(name)
        self._fields: dict[str, tuple[Any, ...]] = {}

    def external(self, name: str, returns: Any, *types: Any) -> Any:
        """A function from elsewhere, LLVM's intrinsics among them."""
        known = self.ir.globals.get(name)
        return known or ir.Function(self.ir, ir.FunctionType(returns, types), name)

    def function(self, name: str, *types: Any, internal: bool = True) -> tuple[Any, ir.IRBuilder]:
        """A function without result, and where its body goes."""
        function = ir.Function(self.ir, ir.FunctionType(VOID, types), name)
        function.linkage = "internal" if internal else "external"
        return function, ir.IRBuilder(function.append_basic_block("entry"))

    def kernel(self, name: str, fields: dict[str, Any], body: Callable[[ir.IRBuilder, Any], None]) -> None:
        """`name`(*fields, threads): body(builder, job) in so many of torch's threads, one the caller's.

        `job` has the fields' values by name, and `job.counter`, an int64 that all threads share, 0 at first.
        """
        kind = ir.LiteralStructType([*fields.values(), I64])
        part, b = self.function(f"{name}_part", PTR)
        places = [b.gep(part.args[0], [I32(0), I32(i)], source_etype=kind) for i in range(len(fields) + 1)]
        values = {key: b.load(place, typ=of) for (key, of), place in zip(fields.items(), places)}
        body(b, SimpleNamespace(**values, counter=places[-1]))
        b.ret_void()
        self._fields[name] = tuple(fields.values())
        entry, b = self.function(name, *fields.values(), I32, internal=False)
        *arguments, threads = entry.args
        job = ir.Constant(kind, ir.Undefined)
        for i, value in enumerate([*arguments, I64(0)]):
            job = b.insert_value(job, value, i)
        place = stack(b, kind)
        b.store(job, place)
        with b.if_else(b.icmp_signed("==", threads, I32(1))) as (alone, together):
            with alone:
                b.call(part, [place])
            with together:
                b.call(
                    self.external("GOMP_parallel", VOID, PTR, PTR, I32, I32), [part, place, threads, I32(0)]
                )
        b.ret_void()

    def compile(self) -> Compiled:
        return Compiled(self.ir, self._fields)


class Compiled:
    """Machine code; it lives as long as this object."""

    def __init__(self, module: ir.Module, fields: dict[str, tuple[Any, ...]]) -> None:
        _share_openmp()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        features["prefer-256-bit"] = False  # else some CPUs with wider vectors get narrower ones
        self._target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
        )
        module.triple, module.data_layout = llvm.get_process_triple(), str(self._target.target_data)
        self._module = llvm.parse_assembly(str(module))
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = False  # vectors are written as such
        options.loop_unrolling = False
        passes = llvm.create_pass_builder(self._target, options)
        passes.getModulePassManager().run(self._module, passes)
        self._engine = llvm.create_mcjit_compiler(self._module, self._target)
        self._engine.finalize_object()
        self._fields = fields

    def function(self, name: str) -> Callable[..., None]:
        """A kernel as a function of its fields and the number of threads; it runs without the interpreter's
        lock."""
        types = [C_TYPES[kind] for kind in self._fields[name]]
        prototype = ctypes.CFUNCTYPE(None, *types, ctypes.c_int32)
        function: Callable[..., None] = prototype(self._engine.get_function_address(name))
        function.code = self  # type: ignore[attr-defined]
        return function


def loop(b: ir.IRBuilder, stop: Any, body: Callable[..., Sequence[Any] | None], *carried: Any) -> list[Any]:
    """for i in range(stop): carried = body(i, *carried); the last values of `carried`."""
    before, head = b.block, b.append_basic_block("head")
    inside, done = b.append_basic_block("inside"), b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    phis = [b.phi(value.type) for value in (stop, *carried)]
    for phi, value in zip(phis, (stop.type(0), *carried), strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", phis[0], stop), inside, done)
    b.position_at_end(inside)
    following = body(*phis) or ()
    for phi, value in zip(phis, (b.add(phis[0], stop.type(1)), *following), strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis[1:]


def stack(b: ir.IRBuilder, kind: Any, count: int = 1) -> Any:
    """Memory for so many values until the function returns."""
    place = b.alloca(kind, count)
    place.type = PTR  # llvmlite's own is typed still
    return place


def at(b: ir.IRBuilder, base: Any, *elements: Any, of: Any = F32) -> Any:
    """Pointer to element number sum(elements) after base."""
    for element in elements:
        base = b.gep(base, [element], source_etype=of)
    return base


def splat(b: ir.IRBuilder, scalar: Any, vector: Any = V8) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, vector.count), None))


def constant(value: float, vector: Any = V8) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def math(module: Module, b: ir.IRBuilder, name: str, *arguments: Any) -> Any:
    """LLVM's intrinsic `name` of float32 or of vectors."""
    kind = arguments[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    types = [argument.type for argument in arguments]
    return b.call(module.external(f"llvm.{name}.{suffix}", kind, *types), arguments)


def total(module: Module, b: ir.IRBuilder, vector: Any, of: str = "fadd") -> Any:
    """Sum of a vector's lanes, or their maximum (`of` = "fmax")."""
    name = f"llvm.vector.reduce.{of}.v{vector.type.count}f32"
    if of == "fadd":
        reduce = module.external(name, F32, F32, vector.type)
        return b.call(reduce, [F32(-0.0), vector], fastmath=("reassoc",))
    return b.call(module.external(name, F32, vector.type), [vector])


def exp(module: Module, b: ir.IRBuilder, x: Any) -> Any:
    """eˣ of a vector, within e⁻⁸⁷ and e⁸⁸: 2ⁿ times a polynomial of the rest (Cephes, expf)."""
    kind, whole = x.type, ir.VectorType(I32, x.type.count)
    for sign, bound in (("<", constant(-87.0, kind)), (">", constant(88.0, kind))):
        x = b.select(b.fcmp_ordered(sign, x, bound), bound, x)  # NaN stays
    n = math(module, b, "rint", b.fmul(x, constant(1.44269504088896341, kind)))
    x = math(module, b, "fma", n, constant(-0.693359375, kind), x)
    x = math(module, b, "fma", n, constant(2.12194440e-4, kind), x)
    y = constant(1.9875691500e-4, kind)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0):
        y = math(module, b, "fma", y, x, constant(factor, kind))
    power = b.add(b.fptosi(n, whole), ir.Constant(whole, [127] * kind.count))
    return b.fmul(y, b.bitcast(b.shl(power, ir.Constant(whole, [23] * kind.count)), kind))


def share(module: Module, b: ir.IRBuilder, count: Any) -> tuple[Any, Any]:
    """This thread's (first, number) of `count` things: even shares."""
    me, threads = (
        b.sext(b.call(module.external(f"omp_get_{name}", I32), []), I64)
        for name in ("thread_num", "num_threads")
    )
    return even(b, count, threads, me)


def even(b: ir.IRBuilder, count: Any, parts: Any, i: Any) -> tuple[Any, Any]:
    """(first, number) in part i of `count` things."""
    first = b.sdiv(b.mul(count, i), parts)
    return first, b.sub(b.sdiv(b.mul(count, b.add(i, I64(1))), parts), first)


def ceil_div(b: ir.IRBuilder, a: Any, c: Any) -> Any:
    return b.sdiv(b.add(a, b.sub(c, I64(1))), c)
