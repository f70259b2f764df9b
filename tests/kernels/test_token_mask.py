from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.token_mask import mask_tokens


def expected(logits: torch.Tensor, mask: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Bit by bit."""
    masked = logits.clone()
    for words, place in zip(mask.tolist(), places):
        for token in range(logits.shape[1]):
            word = token // 32
            if word >= len(words) or not words[word] >> token % 32 & 1:
                masked[place, token] = -torch.inf
    return masked


@pytest.mark.parametrize("vocab", [64, 100, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("places", [[0, 1, 2, 3], [3, 1], [2]])
def test_what_a_mask_leaves_out_is_minus_infinity(
    interpreted: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    vocab: int,
    dtype: torch.dtype,
    places: list[int],
) -> None:
    """Words end within the vocabulary, at its end, or go on after it; on a card's kernel and on a CPU."""
    monkeypatch.setattr(interpreted.token_mask, "BLOCK", 64)
    torch.manual_seed(0)
    logits = torch.randn(4, vocab).to(dtype)
    mask = torch.randint(-(2**31), 2**31 - 1, (len(places), 4), dtype=torch.int32)
    wanted = expected(logits, mask, places)
    rows = torch.tensor(places, dtype=torch.int32)
    by_kernel, by_torch = logits.clone(), logits.clone()
    interpreted.token_mask.mask_tokens_triton(by_kernel, mask, rows)
    mask_tokens(by_torch, mask, rows)
    assert torch.equal(by_kernel, wanted)
    assert torch.equal(by_torch, wanted)


def test_bits_of_a_word_are_in_order_and_the_sign_bit_counts() -> None:
    logits = torch.zeros(1, 33)
    mask = torch.tensor([[-(2**31) + 1, 1]], dtype=torch.int32)
    mask_tokens(logits, mask, torch.zeros(1, dtype=torch.int32))
    assert logits.isfinite().nonzero()[:, 1].tolist() == [0, 31, 32]
