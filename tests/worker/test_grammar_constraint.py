"""Where answers stand in their forms, and the masks that follow: alone, side by side, late, and broken."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLTokenizer

from worker.grammar import constraint as module
from worker.grammar.checker import byte_tokenizer
from worker.grammar.compiling import compile_matcher
from worker.grammar.constraint import Constraint, MaskWriter, Original
from worker.params import StructuredOutputs

END = 256
ENDS = frozenset({END})
WORDS = 9  # of 257 tokens
FORM = StructuredOutputs(regex="(ab|cd)+(!{2})?")


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return byte_tokenizer()


def original(tokenizer: LLTokenizer, form: StructuredOutputs = FORM) -> Original:
    return Original(compile_matcher(tokenizer, form))


def allowed(masks: np.ndarray) -> list[str]:
    """What may come next, as text; the end is "$"."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return ["".join("$" if token == END else chr(token) for token in np.flatnonzero(row)) for row in bits]


def taking(constraint: Constraint, text: str) -> Constraint:
    assert not any(constraint.take(ord(character)) for character in text)
    return constraint


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_are_of_the_tokens_so_far(tokenizer: LLTokenizer, threads: int) -> None:
    """Copies of two originals in turn, behind by no token, one, or several."""
    originals = [original(tokenizer), original(tokenizer)]
    texts = ["", "a", "ab", "c", "abcd", "ab!", "cd!!"]
    constraints = [taking(Constraint(originals[i % 2], ENDS), text) for i, text in enumerate(texts)]
    masks = np.full((len(texts), WORDS), 0xDEADBEEF, np.uint32)
    writer = MaskWriter(tokenizer.vocab_size, ENDS, threads)
    writer.write(constraints, masks)
    assert allowed(masks) == ["ac", "b", "!ac$", "d", "!ac$", "!", "$"]
    for one, text in zip(constraints, ["a", "", "a", "", "c", "", ""]):
        taking(one, text)
    writer.write(constraints, masks)
    assert allowed(masks) == ["b", "b", "b", "d", "d", "!", "$"]
    assert constraints[2].take(END), "an end ends it, wherever"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_that_does_not_fit_fails_its_own_answer(tokenizer: LLTokenizer, threads: int) -> None:
    form = original(tokenizer)
    constraints = [taking(Constraint(form, ENDS), text) for text in ("a", "x", "ab")]
    masks = np.empty((3, WORDS), np.uint32)
    writer = MaskWriter(tokenizer.vocab_size, ENDS, threads)
    for _ in range(2):
        writer.write(constraints, masks)
        assert [bool(one.error) for one in constraints] == [False, True, False]
        assert (masks[1] == 0xFFFFFFFF).all()
        assert allowed(masks[[0, 2]]) == ["b", "!ac$"]


def test_ends_wait_while_anything_else_may_come(tokenizer: LLTokenizer) -> None:
    form = original(tokenizer)
    constraints = [
        taking(Constraint(form, ENDS, keep_on), text)
        for keep_on, text in ((0, "ab"), (9, "ab"), (2, "ab"), (3, "ab"), (9, "ab!!"), (9, "a"))
    ]
    masks = np.empty((len(constraints), WORDS), np.uint32)
    MaskWriter(tokenizer.vocab_size, ENDS, 1).write(constraints, masks)
    assert allowed(masks) == ["!ac$", "!ac", "!ac$", "!ac", "$", "b"]


def test_an_answer_moves_to_another_original_with_a_token_that_was_late(tokenizer: LLTokenizer) -> None:
    first, second = original(tokenizer), original(tokenizer)
    moved = taking(Constraint(first, ENDS), "abc")
    moved.move(second, 2)
    assert (len(first), len(second)) == (1, 0), "too long an answer"
    moved.move(second, 3)
    assert (len(first), len(second)) == (0, 1)
    masks = np.empty((1, WORDS), np.uint32)
    MaskWriter(tokenizer.vocab_size, ENDS, 1).write([moved], masks)
    assert allowed(masks) == ["d"]


def test_after_a_slow_step_each_is_looked_at(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = [Constraint(original(tokenizer), ENDS) for _ in range(2)]
    masks = np.empty((2, WORDS), np.uint32)
    writer = MaskWriter(tokenizer.vocab_size, ENDS, 2)
    monkeypatch.setattr(module, "SLOW_STEP", 0.0)
    writer.write(constraints, masks)
    assert not any(one.error for one in constraints), "nobody knows yet whose fault it is"
    writer.write(constraints, masks)
    assert all("too long" in one.error for one in constraints)
