"""The KV cache's memory: one allocation, a view a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.batch import NULL_PAGE
from worker.model.config import ModelConfig


class KvCache:
    """Keys and values of all layers: one tensor [layers, 2, num_pages, num_kv_heads, page_size, head_dim].

    Not initialised: kernels mask what was never written, and on a CPU untouched pages cost no memory.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, page = config.num_layers, (config.num_kv_heads, page_size, config.head_dim)
        if device.type == "cpu":  # a page's layers side by side: a short text touches few stretches of memory
            pages = torch.empty((num_pages, layers, 2, *page), dtype=dtype, device=device)
            self.pool = pages.permute(1, 2, 0, 3, 4, 5)
        else:
            self.pool = torch.empty((layers, 2, num_pages, *page), dtype=dtype, device=device)
        # Padding rows read it: keep their values finite. (By bytes, as torch does little with FP8.)
        self.pool[:, :, NULL_PAGE].view(torch.uint8).zero_()
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self.pool]

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes
