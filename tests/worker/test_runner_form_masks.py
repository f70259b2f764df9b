"""Memory for what forms allow: used again by every step, as large as need be, applied to the right rows."""

from __future__ import annotations

import numpy as np
import torch

from worker.runner.form_masks import FormMask, FormMasks

CPU = torch.device("cpu")
V = 70  # in 3 words


def write(form: FormMask, tokens: list[set[int]]) -> FormMask:
    form.bits.fill(0)
    for row, allowed in zip(form.bits, tokens):
        for token in allowed:
            row[token // 32] |= np.uint32(1 << token % 32)
    return form


def left(form: FormMask, rows: int = 4) -> list[set[int]]:
    """The tokens that each row of logits has left."""
    logits = torch.zeros(rows, V)
    form.apply(logits)
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def test_masks_reach_their_rows_and_the_next_step_s_take_their_place() -> None:
    masks = FormMasks(4, CPU)
    everything = set(range(V))
    first = write(masks.begin([3, 0, 1], 3), [{1, 69}, {31, 32}, everything])
    assert left(first) == [{31, 32}, everything, everything, {1, 69}]
    second = write(masks.begin([1], 3), [{5}])
    assert left(second) == [everything, {5}, everything, everything]
    assert np.shares_memory(first.bits, second.bits)
    whole = write(masks.begin([0, 1, 2, 3], 3), [{i} for i in range(4)])
    assert left(whole) == [{0}, {1}, {2}, {3}]


def test_fewer_words_leave_out_the_rest_and_more_take_more_memory() -> None:
    """A tokenizer may have fewer tokens than the output layer has rows, or more."""
    masks = FormMasks(2, CPU)
    assert left(write(masks.begin([1], 1), [{3, 30}]), 2) == [set(range(V)), {3, 30}]
    assert left(write(masks.begin([0, 1], 9), [{64}, {69, 200}]), 2) == [{64}, {69}]


def test_bits_lie_where_the_kernel_reads_sixteen_bytes_at_a_time() -> None:
    for rows in (1, 3, 4, 250):
        form = FormMasks(rows, CPU).begin([0], 5)
        start = torch.from_numpy(form.memory._host.numpy()).data_ptr()
        assert (form.bits.ctypes.data - start) % 16 == 0
