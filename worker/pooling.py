"""Pooling: one vector of a whole prompt, out of the states that the last layer leaves of its tokens."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

PoolingType = Literal["last", "mean"]


class PoolingConfig(msgspec.Struct, frozen=True):
    """How a model makes embeddings.

    type: "last": the state of the last token; "mean": the mean of all tokens' states. After the final norm.
    normalize: vectors have length 1 (in the Euclidean norm).
    size: numbers in a vector.
    sizes: shorter ones that the model was trained to be cut to (Matryoshka, arXiv 2205.13147); all down to 1
        when `any_size`.
    """

    type: PoolingType
    normalize: bool
    size: int
    sizes: tuple[int, ...] = ()
    any_size: bool = False

    def allows(self, dimensions: int) -> bool:
        """Whether a vector may be cut to so many numbers."""
        if dimensions == self.size or dimensions in self.sizes:
            return True
        return self.any_size and 1 <= dimensions <= self.size


def finish_vector(pooled: bytes, config: PoolingConfig, dimensions: int | None = None) -> np.ndarray:
    """The embedding, float32, from an engine's pooled states (`RequestOutput.pooled`)."""
    vector = np.frombuffer(pooled, "<f4")
    if dimensions is not None:
        vector = vector[:dimensions]
    if config.normalize:
        length = np.linalg.norm(vector)
        vector = vector / np.maximum(length, np.float32(1e-12))
    return vector.astype("<f4", copy=False)
