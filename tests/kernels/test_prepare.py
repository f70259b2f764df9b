from __future__ import annotations

from types import SimpleNamespace

import torch

PAGE, UNREAD = 16, -1


def test_inputs_of_a_decode_step(interpreted: SimpleNamespace) -> None:
    """Rows in any order and twice, the last position of a table, tokens known and not."""
    torch.manual_seed(0)
    tables = torch.randint(1, 500, (9, 40), dtype=torch.int32)
    last = torch.randint(0, 99, (9,))
    inputs = torch.zeros(3, 16, dtype=torch.int64)[:, :6]
    rows = inputs[0] = torch.tensor([3, 8, 0, 5, 1, 8])
    tokens = inputs[1] = torch.tensor([UNREAD, 5, 6, UNREAD, 7, 0])
    positions = inputs[2] = torch.tensor([0, 15, 16, 639, 100, 0])
    made = interpreted.prepare.prepare_decode_triton(inputs, last, tables, PAGE, UNREAD)
    assert torch.equal(made.tokens, torch.where(tokens == UNREAD, last[rows], tokens))
    assert torch.equal(made.slots, tables[rows, positions // PAGE].long() * PAGE + positions % PAGE)
    assert torch.equal(made.seq_lens, (positions + 1).int())
    for i, position in enumerate(positions.tolist()):
        pages = position // PAGE + 1
        assert torch.equal(made.block_tables[i, :pages], tables[rows[i], :pages])
