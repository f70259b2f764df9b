"""A float32 matrix on a CPU laid out once, so that products stream it: the panels of `cpu_gemm.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import compiled

STORE, ADD, SWIGLU = 0, 1, 2  # what a product does with its sums


class PackedMatrix:
    """A weight [N, K] in panels; it needs as much memory as the weight did, rounded up to whole panels.

    A gated one is [2I, K], gate above up: its panels are half gate, half up, and all it does is `swiglu`.
    """

    __slots__ = ("_columns", "_panels", "_product", "_threads", "gated", "nbytes", "shape")

    def __init__(self, weight: Tensor, panels: Tensor, gated: bool) -> None:
        kernels = compiled()
        assert kernels is not None
        self.shape = weight.shape
        self.gated = gated
        self.nbytes = panels.nbytes
        self._panels = panels
        self._product = kernels.product
        self._columns = len(weight) // 2 if gated else len(weight)

    def product(self, x: Tensor) -> Tensor:
        """x [T, K] times the weight transposed -> [T, N]."""
        return self._run(x, torch.empty((len(x), self._columns)), STORE)

    def add_product(self, x: Tensor, y: Tensor) -> Tensor:
        """y [T, N] += x [T, K] times the weight transposed, in place. The rows of y must be contiguous."""
        return self._run(x, y, ADD)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(x gateᵀ) * (x upᵀ) -> [T, I]."""
        return self._run(x, torch.empty((len(x), self._columns)), SWIGLU)

    def _run(self, x: Tensor, y: Tensor, mode: int) -> Tensor:
        rows, inner = x.shape
        if x.dtype != torch.float32 or inner != self.shape[1]:  # the kernel sees addresses only
            raise ValueError(f"x must be float32 [T, {self.shape[1]}], not {x.dtype} {list(x.shape)}")
        if y.dtype != torch.float32 or y.shape != (rows, self._columns) or y.stride(1) != 1:
            raise ValueError(
                f"y must be float32 [{rows}, {self._columns}] with contiguous rows, "
                f"not {y.dtype} {list(y.shape)} with strides {y.stride()}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        panels, threads = self._panels, torch.get_num_threads()
        self._product(
            x.data_ptr(),
            x.stride(0),
            panels.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            rows,
            self._columns,
            inner,
            mode,
            min(threads, len(panels)),
        )
        return y


def pack(weight: Tensor, gated: bool = False) -> PackedMatrix | None:
    """The weight [N, K], or [2I, K] with gate above up, packed; None where there is no kernel for it: types
    other than float32, other devices, CPUs that `cpu.py` compiles nothing for."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    kernels = compiled()
    if kernels is None:
        return None
    parts, width = (weight.chunk(2), kernels.width // 2) if gated else ((weight,), kernels.width)
    missing = -len(parts[0]) % width
    blocks = [F.pad(part, (0, 0, 0, missing)).view(-1, width, part.shape[1]) for part in parts]
    return PackedMatrix(weight, torch.cat(blocks, 1).transpose(1, 2).contiguous(), gated)
