"""The layers of a decoder-only transformer, over kernels/.

Plain objects holding tensors: inference only, and every Python operation here runs once a layer for every
token. Each matrix is one GEMM: query, key and value rows are fused, so are gate and up. Head counts are those
this process holds, so that a rank of a sharded model is the same code with fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kernels.attention import rope_and_attention
from kernels.batch import AttentionBatch
from kernels.gemm_skinny import Norm
from kernels.linear import (
    Weight,
    linear,
    linear_add_norm,
    linear_swiglu,
    normed_linear,
    normed_linear_swiglu,
)
from kernels.norm import rms_norm
from kernels.packed_matrix import PackedMatrix, pack
from kernels.qk_norm import QkNorm
from worker.model.config import ModelConfig
from worker.model.rope import cos_sin_table, first_row
from worker.model.shapes import parameter_shapes

Parameters = Callable[
    [str], Tensor | None
]  # by name within the layer; None: this model has no such parameter


class Linear:
    """Weight [out, in] and bias [out], if any, of y = x Wᵀ + b."""

    __slots__ = ("bias", "weight")

    def __init__(self, parameters: Parameters, name: str) -> None:
        self.weight: Weight = _parameter(parameters, f"{name}.weight")
        self.bias = parameters(f"{name}.bias")


def _parameter(parameters: Parameters, name: str) -> Tensor:
    parameter = parameters(name)
    assert parameter is not None
    return parameter


class Attention:
    """Grouped-query attention with rotary positions over the paged KV cache, of the normalised residual
    stream [T, hidden] and added to it."""

    __slots__ = ("head_dim", "norm", "output", "qk_norm", "qkv", "scale", "sizes", "window")

    def __init__(
        self, parameters: Parameters, config: ModelConfig, num_heads: int, num_kv_heads: int, window: int
    ) -> None:
        self.norm = Norm(_parameter(parameters, "input_norm.weight"), config.rms_norm_eps)
        self.qkv = Linear(parameters, "qkv")
        self.output = Linear(parameters, "output")
        self.head_dim = config.head_dim
        self.sizes = [num_heads, num_kv_heads, num_kv_heads]
        self.scale = config.head_dim**-0.5
        self.window = window
        q_norm, k_norm = parameters("q_norm.weight"), parameters("k_norm.weight")
        self.qk_norm: QkNorm | None = None
        if q_norm is not None and k_norm is not None:
            self.qk_norm = QkNorm(q_norm, k_norm, self.norm.eps)

    def __call__(
        self,
        residual: Tensor,
        normed: Tensor | None,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        following: Norm,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The new residual stream, and its rows by the norm that follows, if they came on the way. `normed`:
        those of this layer's norm, if they did."""
        if normed is None:
            qkv = normed_linear(residual, self.norm, self.qkv.weight, self.qkv.bias)
        else:
            qkv = linear(normed, self.qkv.weight, self.qkv.bias)
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split_with_sizes(self.sizes, 1)
        out = rope_and_attention(
            q, k, v, cos_sin, batch, k_cache, v_cache, self.scale, self.window, self.qk_norm
        )
        if rows is not None:
            out, residual = out[rows], residual[rows]
        output = self.output
        return residual, linear_add_norm(out.flatten(1), output.weight, output.bias, residual, following)


class Mlp:
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202) of the normalised residual stream x [T, hidden], added
    to it."""

    __slots__ = ("down", "gate_up", "norm")

    def __init__(self, parameters: Parameters, config: ModelConfig) -> None:
        self.norm = Norm(_parameter(parameters, "mlp_norm.weight"), config.rms_norm_eps)
        self.gate_up = Linear(parameters, "gate_up")
        self.down = Linear(parameters, "down")

    def __call__(
        self, residual: Tensor, normed: Tensor | None, following: Norm
    ) -> tuple[Tensor, Tensor | None]:
        """As `Attention`."""
        down = self.down
        if normed is None:
            x = normed_linear_swiglu(residual, self.norm, self.gate_up.weight)
        else:
            x = linear_swiglu(normed, self.gate_up.weight)
        return residual, linear_add_norm(x, down.weight, down.bias, residual, following)


class CausalLM:
    """A decoder-only language model: token ids to hidden states to logits.

    `named_parameters` are allocated here, uninitialised, as shapes.py lists them; a loader fills them.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, max_model_len: int
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.named_parameters: dict[str, Tensor] = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, shape in parameter_shapes(config).items()
        }
        self._max_model_len = max_model_len
        self.cos_sin = cos_sin_table(config.rope, max_model_len, device)
        named = self.named_parameters
        self._embedding = named["embedding.weight"]
        self._lm_head: Weight = named.get("lm_head.weight", self._embedding)
        self._norm = Norm(named["final_norm.weight"], config.rms_norm_eps)
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        self._packed: list[PackedMatrix] = []

    def _layer(self, i: int) -> tuple[Attention, Mlp]:
        config, named = self.config, self.named_parameters

        def parameters(name: str) -> Tensor | None:
            return named.get(f"layers.{i}.{name}")

        window = config.window(i) if config.window(i) < self._max_model_len else 0  # else it hides nothing
        attention = Attention(parameters, config, config.num_heads, config.num_kv_heads, window)
        return attention, Mlp(parameters, config)

    def first_row(self, length: int) -> int:
        """Row of `cos_sin` for position 0 of a sequence that may get `length` tokens long."""
        return first_row(self.config.rope, self._max_model_len, length)

    def pack(self) -> None:
        """Lay the matrices out for products on a CPU, where that helps. For a model that is filled: they are
        no longer among `named_parameters`, and take the memory that they took before (tied embeddings, which
        stay rows to look up as well, twice)."""
        for i, (attention, mlp) in enumerate(self._layers):
            matrices = {
                "qkv": attention.qkv,
                "output": attention.output,
                "gate_up": mlp.gate_up,
                "down": mlp.down,
            }
            for name, matrix in matrices.items():
                matrix.weight = self._pack(f"layers.{i}.{name}.weight", gated=matrix is mlp.gate_up)
        tied = "lm_head.weight" not in self.named_parameters
        self._lm_head = self._pack("embedding.weight" if tied else "lm_head.weight", keep=tied)

    def _pack(self, name: str, *, keep: bool = False, gated: bool = False) -> Weight:
        weight = self.named_parameters[name]
        packed = pack(weight, gated)
        if packed is None:
            return weight
        self._packed.append(packed)
        if not keep:
            del self.named_parameters[name]
        return packed

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter once, but for packed ones; tied embeddings are one."""
        return iter(self.named_parameters.values())

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters()) + sum(p.nbytes for p in self._packed)

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the step's tokens through all layers, writing their keys and values into the cache.

        Args:
            token_ids: [T] int64.
            batch: whose tokens they are, at which positions, and where their keys and values go.
            kv_caches: (k_cache, v_cache) of each layer, [num_pages, num_kv_heads, page_size, head_dim]. Only
                as many layers are run.
            rows: [R] int64: the tokens whose states are wanted; None: all. The last layer does no more for
                the others than fill the cache.

        Returns:
            [R, hidden_size] after the final norm.
        """
        residual = embedding(token_ids, self._embedding)
        normed: Tensor | None = None
        cos_sin, layers = self.cos_sin, self._layers
        last = len(kv_caches) - 1
        for i, ((attention, mlp), (k_cache, v_cache)) in enumerate(zip(layers, kv_caches)):
            wanted = rows if i == last else None
            residual, normed = attention(residual, normed, cos_sin, batch, k_cache, v_cache, mlp.norm, wanted)
            residual, normed = mlp(residual, normed, layers[i + 1][0].norm if i < last else self._norm)
        return normed if normed is not None else rms_norm(residual, *self._norm)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden_size] → [R, vocab_size], in `out` if given."""
        return linear(hidden, self._lm_head, out=out)
