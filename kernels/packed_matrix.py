"""float32 products with few rows on a CPU, at the speed of memory and then of arithmetic.

A BLAS product packs its operands anew in every call, which costs as much as the product itself as long as
there are few rows. oneDNN's 1 x 1 convolution takes a matrix packed beforehand: panels of P outputs,
[N / P, K, P], P chosen for the machine. To MKL the same panels are a batch of matrices, and its batched
product streams them where the convolution is slow: one row, for which oneDNN has no fast kernel (a vocabulary
is so wide that four rows of a convolution cost less all the same), and a few rows of a small matrix.

Microseconds with two threads on Zen 3 (AVX2), weights out of cache, beside W xᵀ by MKL (`linear.py`):

    N x K \\ rows       1           4            8           16           32          128
    960x576      180/243     317/266      330/403      417/477      508/537    1179/1455
    576x576      113/171     202/195      209/285      280/259      387/386     1093/888
    3072x576     530/819     790/966     809/1339     923/1479    1443/1927    4135/6215
    576x1536     290/376     417/411      525/622      602/702      752/871    2063/2299
    49152x576  7.9k/10.1k   9.9k/13k    12.7k/23k      18k/33k      30k/45k    103k/101k
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_WIDTH = 64  # of a panel
# Rows of one convolution. oneDNN picks the panels' width by the number of rows too, and repacks the matrix in
# each call when they differ, which takes a hundred times as long: only those that agree with HINT are used.
HINT = 16
ROWS = (4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
CALL_ROWS = 24  # what a convolution costs before its rows, in rows
SMALL, FEW_ROWS = 600_000, 16  # elements of a matrix, and rows, up to which the batched product is faster
# A vocabulary's columns, from which fewer of them are tried: each takes a tenth of a second at the start.
WIDE = 16384
MOST_WIDE_ROWS = 64


class PackedMatrix:
    """A weight [N, K] in panels; it needs as much memory as the weight did."""

    __slots__ = ("_convolved", "_panels", "_rows", "nbytes", "shape")

    def __init__(self, weight: Tensor, convolved: Tensor, panels: Tensor, rows: tuple[int, ...]) -> None:
        self.shape = weight.shape
        self._convolved = convolved  # owns the memory that `panels` shows
        self._panels = panels
        self._rows = rows
        self.nbytes = panels.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] times the weight transposed, plus bias [N] -> [T, N], contiguous."""
        rows, (columns, inner) = x.shape[0], self.shape
        if (rows == 1 and columns < WIDE) or (rows <= FEW_ROWS and columns * inner <= SMALL):
            y = self._batched(x)
            return y if bias is None else y.add_(bias)
        sizes = _cut(rows, self._rows)
        missing = sum(sizes) - rows
        x = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
        if len(sizes) == 1:
            y = self._convolve(x, bias)
        else:
            y = torch.cat([self._convolve(part, bias) for part in x.split_with_sizes(sizes)])
        return y[:rows] if missing else y

    def _batched(self, x: Tensor) -> Tensor:
        panels, rows = self._panels, len(x)
        y = torch.bmm(x.expand(len(panels), rows, -1), panels).transpose(0, 1).reshape(rows, -1)
        return y if y.shape[1] == self.shape[0] else y[:, : self.shape[0]].contiguous()

    def _convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Rows as the pixels of an image one pixel high, its channels last."""
        image = x.view(1, 1, *x.shape).permute(0, 3, 1, 2)
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(
            image, self._convolved, bias, (0, 0), (1, 1), (1, 1), 1, "none", [], ""
        )
        return y.permute(0, 2, 3, 1).view(len(x), -1)


@lru_cache(1024)
def _cut(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the convolutions for so many rows, the last of them padded: what costs least."""
    whole = [size for size in sizes if size >= rows][:1]
    smaller = [size for size in sizes if size < rows][-1:]
    if not smaller or whole == [rows]:
        return tuple(whole)
    split = (*smaller, *_cut(rows - smaller[0], sizes))
    if not whole or sum(split) + CALL_ROWS * (len(split) - 1) < whole[0]:
        return split
    return tuple(whole)


def pack(weight: Tensor) -> PackedMatrix | None:
    """The weight [N, K] packed for the present number of threads; None where this isn't known to help: other
    types than float32, other devices, a torch or a CPU without these kernels."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.shape[1] < 2:
        return None
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return None
    layout = _layout(*weight.shape, torch.get_num_threads())
    convolved = _reorder(weight, HINT)
    panels = _panels(weight, convolved, layout.width)
    return PackedMatrix(weight, convolved, panels, layout.rows) if panels is not None else None


class _Layout(NamedTuple):
    width: int  # of a panel
    rows: tuple[int, ...]  # those of ROWS that oneDNN wants this width for


@lru_cache
def _layout(columns: int, inner: int, threads: int) -> _Layout:
    probe = torch.zeros(columns, inner)
    probe[0, 1] = 1  # behind the first elements of a panel's columns: its place is the width
    most = ROWS[-1] if columns < WIDE else MOST_WIDE_ROWS
    widths = {rows: _place_of_one(_reorder(probe, rows)) for rows in ROWS if rows <= most}
    return _Layout(widths[HINT], tuple(rows for rows in widths if widths[rows] == widths[HINT]))


def _place_of_one(convolved: Tensor) -> int:
    return int(_memory(convolved)[: MAX_WIDTH + 1].argmax())


def _reorder(weight: Tensor, rows: int) -> Tensor:
    columns, inner = weight.shape
    convolved: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight.view(columns, inner, 1, 1), (0, 0), (1, 1), (1, 1), 1, (1, inner, 1, rows)
    )
    return convolved


def _memory(convolved: Tensor) -> Tensor:
    """The bytes of an opaque oneDNN tensor as float32, for as long as it lives."""
    nbytes = torch.ops.mkldnn._nbytes(convolved)
    address = torch.ops.mkldnn.data_ptr(convolved)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.float32)


def _panels(weight: Tensor, convolved: Tensor, width: int) -> Tensor | None:
    """The packed weight as [N / P, K, P], if that is what it is: the first and the last panel tell."""
    columns, inner = weight.shape
    memory = _memory(convolved)
    count = -(-columns // width) if width else 0
    if memory.numel() != count * inner * width:
        return None
    panels = memory.view(count, inner, width)
    last = weight[(count - 1) * width :]
    agrees = torch.equal(panels[0].t()[:columns], weight[:width]) and torch.equal(
        panels[-1].t()[: len(last)], last
    )
    return panels if agrees else None
