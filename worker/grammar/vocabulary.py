"""A model's tokenizer as llguidance knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.grammar.compiling import GrammarError
from worker.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def token_table(tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """llguidance's table of the tokenizer's tokens, special ones told apart; answers end with the tokenizer's
    ends and the model's own `eos_token_ids`.

    It takes a fraction of a second, in which no other thread of Python runs. Raises GrammarError for a
    tokenizer that llguidance doesn't understand.
    """
    from llguidance import LLTokenizer

    ends = sorted(end for end in eos_token_ids.union(tokenizer.eos_token_ids) if end < tokenizer.vocab_size)
    try:
        return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=ends or None)
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer can't be used for structured output: {error}") from error
