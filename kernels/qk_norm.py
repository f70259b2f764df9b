"""RMSNorm of each head's query and key, before they are rotated (Qwen3; arXiv:2505.09388).

    y = x / sqrt(mean(x²) + eps) * weight            over the D dimensions of one head

Sums are float32 whatever the type. On a GPU whatever rotates does it on the way, in registers: rope_cache.py,
or attention_decode.py where all sequences decode. Here is what comes before rotation on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.norm import rms_norm_reference


class QkNorm(NamedTuple):
    """Weights [D] for all query heads and for all key heads; eps is added to the mean square."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def qk_norm(q: Tensor, k: Tensor, norm: QkNorm) -> tuple[Tensor, Tensor]:
    """Normalised queries [T, Hq, D] and keys [T, Hkv, D], of the same shapes and types, by torch.

    They lie side by side in one matrix, as they come: rotating them takes half the time then.
    """
    both = torch.cat((q, k), 1).float()
    inverse = torch.linalg.vector_norm(both, 2, 2, True).square_().div_(q.shape[2]).add_(norm.eps).rsqrt_()
    y = both.mul_(inverse)
    heads = (q.shape[1], k.shape[1])
    for part, weight in zip(y.split_with_sizes(heads, 1), (norm.q_weight, norm.k_weight), strict=True):
        part.mul_(weight)
    new_q, new_k = y.to(q.dtype).split_with_sizes(heads, 1)
    return new_q, new_k


def qk_norm_reference(q: Tensor, k: Tensor, norm: QkNorm) -> tuple[Tensor, Tensor]:
    """`qk_norm` a head at a time, in float64 rounded once."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([rms_norm_reference(head, weight, norm.eps) for head in x.unbind(1)], 1)

    return normed(q, norm.q_weight), normed(k, norm.k_weight)
