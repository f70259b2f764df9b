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

from kernels.attention import paged_attention
from kernels.batch import AttentionBatch
from kernels.linear import linear, linear_swiglu
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope_cache import rope_and_cache
from worker.model.config import ModelConfig
from worker.model.rope import cos_sin_table
from worker.model.shapes import parameter_shapes

Parameters = Callable[
    [str], Tensor | None
]  # by name within the layer; None: this model has no such parameter


class Linear:
    """y = x Wᵀ + b: [T, in] → [T, out]."""

    __slots__ = ("bias", "weight")

    def __init__(self, parameters: Parameters, name: str) -> None:
        weight = parameters(f"{name}.weight")
        assert weight is not None
        self.weight = weight
        self.bias = parameters(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Attention:
    """Grouped-query attention with rotary positions over the paged KV cache: [T, hidden] → [T, hidden]."""

    __slots__ = ("head_dim", "output", "qkv", "scale", "sizes", "window")

    def __init__(
        self, parameters: Parameters, config: ModelConfig, num_heads: int, num_kv_heads: int
    ) -> None:
        self.qkv = Linear(parameters, "qkv")
        self.output = Linear(parameters, "output")
        self.head_dim = config.head_dim
        self.sizes = [num_heads, num_kv_heads, num_kv_heads]
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_window or 0

    def __call__(
        self, x: Tensor, cos_sin: Tensor, batch: AttentionBatch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, self.head_dim).split_with_sizes(self.sizes, 1)
        q = rope_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache)
        out = paged_attention(q, k_cache, v_cache, batch, self.scale, self.window)
        return self.output(out.flatten(1))


class Mlp:
    """down(silu(gate(x)) * up(x)): [T, hidden] → [T, hidden] (arXiv 2002.05202)."""

    __slots__ = ("down", "gate_up")

    def __init__(self, parameters: Parameters) -> None:
        self.gate_up = Linear(parameters, "gate_up")
        self.down = Linear(parameters, "down")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(linear_swiglu(x, self.gate_up.weight))


class DecoderLayer:
    """Attention and MLP, each followed by the sum with the residual stream and the norm of what comes next.

    So a layer takes its input already normalised, and hands on the next one's; the first norm is the model's.
    """

    __slots__ = ("attention", "eps", "mlp", "mlp_norm", "next_norm")

    def __init__(
        self, attention: Attention, mlp: Mlp, mlp_norm: Tensor, next_norm: Tensor, eps: float
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self.mlp_norm, self.next_norm, self.eps = mlp_norm, next_norm, eps

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = self.attention(x, cos_sin, batch, k_cache, v_cache)
        x, residual = add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return add_rms_norm(self.mlp(x), residual, self.next_norm, self.eps)


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
        self.cos_sin = cos_sin_table(config.rope, max_model_len, device)
        named = self.named_parameters
        self._embedding = named["embedding.weight"]
        self._lm_head = named.get("lm_head.weight", self._embedding)
        norms = [named[f"layers.{i}.input_norm.weight"] for i in range(config.num_layers)]
        self._first_norm, *next_norms = [*norms, named["final_norm.weight"]]
        self._layers = [self._layer(i, next_norm) for i, next_norm in enumerate(next_norms)]

    def _layer(self, i: int, next_norm: Tensor) -> DecoderLayer:
        config, named = self.config, self.named_parameters

        def parameters(name: str) -> Tensor | None:
            return named.get(f"layers.{i}.{name}")

        return DecoderLayer(
            Attention(parameters, config, config.num_heads, config.num_kv_heads),
            Mlp(parameters),
            named[f"layers.{i}.mlp_norm.weight"],
            next_norm,
            config.rms_norm_eps,
        )

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter once; tied embeddings are one."""
        return iter(self.named_parameters.values())

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv_caches: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Run the step's tokens through all layers, writing their keys and values into the cache.

        Args:
            token_ids: [T] int64.
            batch: whose tokens they are, at which positions, and where their keys and values go.
            kv_caches: (k_cache, v_cache) of each layer, [num_pages, num_kv_heads, page_size, head_dim].

        Returns:
            [T, hidden_size] after the final norm.
        """
        residual = embedding(token_ids, self._embedding)
        x = rms_norm(residual, self._first_norm, self.config.rms_norm_eps)
        cos_sin = self.cos_sin
        for layer, (k_cache, v_cache) in zip(self._layers, kv_caches, strict=True):
            x, residual = layer(x, residual, cos_sin, batch, k_cache, v_cache)
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden_size] → [R, vocab_size], in `out` if given."""
        return linear(hidden, self._lm_head, out=out)
