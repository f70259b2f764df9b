"""A model's tokenizer as llguidance knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.grammar.compiling import GrammarError
from worker.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Sets of tokens of which llguidance takes all, or looks at each: what may stand in a JSON string, by length.
# Its own have 10, 30 and any; where a bounded string is nearly full, it would look at the whole vocabulary.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in (3, 6, 10, 20, 30)),
    f"{_IN_STRING}+",
]


def token_table(tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """llguidance's table of the tokenizer's tokens, special ones told apart; answers end with the tokenizer's
    ends and the model's own `eos_token_ids`.

    It takes a fraction of a second, in which no other thread of Python runs but for a moment in between.
    Raises GrammarError for a tokenizer that llguidance doesn't understand.
    """
    from llguidance import LLTokenizer

    ends = sorted(end for end in eos_token_ids.union(tokenizer.eos_token_ids) if end < tokenizer.vocab_size)
    try:
        bare = LLTokenizer(
            tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=ends or None, slices=[]
        )
        return bare.with_slices(_SLICES)
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer can't be used for structured output: {error}") from error
