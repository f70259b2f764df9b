"""y = x Wᵀ + b, by whichever formulation of it the device is fastest at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gemm_skinny import MAX_ROWS, Norm, best_tile, skinny_triton
from kernels.norm import add_rms_norm, rms_norm
from kernels.packed_matrix import PackedMatrix
from kernels.swiglu import swiglu

Weight = Tensor | PackedMatrix

# Microseconds of F.linear / W xᵀ ("mm") in float32 with two threads on Zen 3 (AVX2, MKL 2024.2), weights out
# of cache. At one row torch calls GEMV, which streams weights at half the speed of GEMM, so there "mm" has
# the row doubled; beyond, MKL is 1.2 to 3 times faster with the long side as the GEMM's columns, until both
# reach the peak.
#
#   N x K \ rows        1           2           4           8          16          32          64         128
#   576x576      238/163     260/131     323/132     289/212     295/226     377/307     524/518   1473/1232
#   1536x576     532/309     858/305     874/347    1024/577    1028/590    1221/767   1803/1188   2940/1992
#   576x1536     342/386     527/298     608/317     669/496     762/430     933/657   1273/1065   1967/1955
#   3072x576    1014/631    2030/543    1924/648   1655/1025   1812/1257   2265/1749           -   8627/7243
#   49152x576  14.3k/8.3k  28.6k/8.8k  34.5k/10k   32.2k/17k   40.3k/25k   56.3k/35k    160k/88k   258k/148k
MM_ROWS = 64
WIDE = 16384  # output columns (a vocabulary) from which `mm` wins at any number of rows


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    columns, inner = weight.shape
    if rows == 1 and columns >= inner:
        y = torch.mm(weight, torch.cat((x, x)).t())[:, 0].contiguous().unsqueeze(0)
        return y if bias is None else y.add_(bias)
    if rows == 1 or (rows > MM_ROWS and columns < WIDE):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t()


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]; in `out` if given.

    On a CPU the result of a weight that isn't packed may be column-major (the transposed view of what the
    GEMM wrote): elementwise operations and the other kernels here take it as it is, for less than a copy
    would cost; `.view` can't merge its dimensions.
    """
    if isinstance(weight, PackedMatrix):
        y = weight.product(x)
        if bias is not None:
            y.add_(bias)
    elif x.is_cuda:
        tile = best_tile(x, weight)
        if tile is not None:
            return skinny_triton(x, weight, bias, tile, out=out)
        if out is not None and bias is None:
            return torch.mm(x, weight.t(), out=out)
        y = F.linear(x, weight, bias)
    else:
        y = _linear_cpu(x, weight, bias)
    return y if out is None else out.copy_(y)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual [T, N] += linear(x, weight, bias), in place."""
    if x.is_cuda and isinstance(weight, Tensor):
        tile = best_tile(x, weight)
        if tile is not None:
            return skinny_triton(x, weight, bias, tile, add=True, out=residual)
        if bias is None:
            return residual.addmm_(x, weight.t())
    if isinstance(weight, PackedMatrix):
        return weight.add_product(x, residual if bias is None else residual.add_(bias))
    return residual.add_(linear(x, weight, bias))


# With more rows than a kernel of our own takes, and too few to fill the card, cuBLAS splits a long K and adds
# the parts up by a second kernel. A batched product gives the parts themselves, and the norm behind adds them
# up: 43.4 us for 47.4 with 128 rows of 3584x18944, 54.6 for 57.8 with 256.
PARTS = 2
PARTS_ROWS = 256


def linear_add_norm(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, norm: Norm
) -> Tensor | None:
    """residual [T, N] += linear(x, weight, bias) in place -> its normalised rows [T, N]; None where the
    product that follows takes the norm along (`normed_linear`)."""
    rows, (columns, inner) = len(x), weight.shape
    if not x.is_cuda or not isinstance(weight, Tensor) or rows == 1:
        linear_add(x, weight, bias, residual)
        return None
    long = inner >= 3 * columns and inner % (8 * PARTS) == 0
    if MAX_ROWS < rows <= PARTS_ROWS and long and bias is None and x.element_size() == 2:
        left, right = (m.unflatten(1, (PARTS, -1)) for m in (x, weight))
        parts = torch.bmm(left.transpose(0, 1), right.permute(1, 2, 0), out_dtype=torch.float32)
        return add_rms_norm(parts, residual, norm.weight, norm.eps)[0]
    linear_add(x, weight, bias, residual)
    return rms_norm(residual, norm.weight, norm.eps)


def normed_linear(x: Tensor, norm: Norm, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`linear` of the normalised rows of x: see `rms_norm`."""
    if x.is_cuda and isinstance(weight, Tensor):
        tile = best_tile(x, weight, normed=True)
        if tile is not None:
            return skinny_triton(x, weight, bias, tile, norm=norm)
    return linear(rms_norm(x, norm.weight, norm.eps), weight, bias)


def linear_swiglu(x: Tensor, weight: Weight) -> Tensor:
    """silu(x gateᵀ) * (x upᵀ) -> [T, N]; weight [2N, K] is gate above up."""
    if x.is_cuda and isinstance(weight, Tensor):
        tile = best_tile(x, weight, swiglu=True)
        if tile is not None:
            return skinny_triton(x, weight, None, tile, swiglu=True)
    if isinstance(weight, PackedMatrix) and weight.gated:
        return weight.swiglu(x)
    return swiglu(linear(x, weight))


def normed_linear_swiglu(x: Tensor, norm: Norm, weight: Weight) -> Tensor:
    """`linear_swiglu` of the normalised rows of x."""
    if x.is_cuda and isinstance(weight, Tensor):
        tile = best_tile(x, weight, swiglu=True, normed=True)
        if tile is not None:
            return skinny_triton(x, weight, None, tile, swiglu=True, norm=norm)
    return linear_swiglu(rms_norm(x, norm.weight, norm.eps), weight)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in float64, rounded once."""
    y = x.double() @ weight.double().t()
    return (y if bias is None else y + bias.double()).to(x.dtype)
