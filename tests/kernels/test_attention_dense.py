from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.attention import paged_attention_reference

from .cases import assert_close, paged_case


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_matches_reference(interpreted: SimpleNamespace, window: int, head_dim: int) -> None:
    """A chunk behind a context, and a whole prompt longer than a block, behind two decodes."""
    case = paged_case(
        [37, 5, 20, 70], [1, 1, 7, 70], q_heads=4, kv_heads=2, head_dim=head_dim, page_size=16,
        dtype=torch.float16,
    )  # fmt: skip
    out = torch.full_like(case.q, float("nan"))
    module = interpreted.attention_dense
    tile = module.Tile(32, 64, 4, 2)
    module.dense_attention_triton(case.q, case.k_cache, case.v_cache, case.batch, 0.125, window, out, tile)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, 0.125, window)
    assert_close(out[2:], expected[2:])
    assert out[:2].isnan().all()
