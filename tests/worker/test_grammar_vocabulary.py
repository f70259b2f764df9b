"""A model's tokens as llguidance sees them: with the bytes that they have in the answer's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tests.worker.text_models import byte_level, sentencepiece, write_directory
from worker.grammar.compiling import GrammarError, compile_matcher
from worker.grammar.vocabulary import token_table
from worker.params import StructuredOutputs
from worker.text.tokenizer import Tokenizer

MAKERS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without a prefix": lambda: sentencepiece(add_space_prefix=False),
}


def tokenizer_of(kind: str, origin: str, folder: Path) -> Tokenizer:
    tokenizer = MAKERS[kind]()
    if origin == "gguf":
        return tokenizer
    return Tokenizer.from_path(write_directory(folder, tokenizer, eos_token=tokenizer.eos_token))


@pytest.mark.parametrize(
    ("kind", "origin"),
    [*((kind, "gguf") for kind in MAKERS), ("byte-level", "directory"), ("sentencepiece", "directory")],
)
def test_bytes_are_those_of_the_text(kind: str, origin: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, origin, tmp_path)
    table = token_table(tokenizer, frozenset())
    assert table.vocab_size == tokenizer.vocab_size
    assert set(table.eos_tokens) == set(tokenizer.eos_token_ids)
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        if data == b"\xff":
            continue  # llguidance's mark of special tokens; no text has that byte
        # It takes every added token in angle brackets for special: text spells such a mark out.
        assert table.is_special_token(token) == (token in tokenizer.special_ids or data == b"<tool>"), data
        if not table.is_special_token(token):
            assert table.decode_bytes([token]) == data


@pytest.mark.parametrize("kind", MAKERS)
def test_special_tokens_never_spell_text(kind: str) -> None:
    """A form that allows any text allows none of them but the end."""
    tokenizer = MAKERS[kind]()
    matcher = compile_matcher(token_table(tokenizer, frozenset()), StructuredOutputs(regex="(?s:.)*"))
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    ids = {token for token in range(tokenizer.vocab_size) if allowed >> token & 1}
    assert ids & tokenizer.special_ids == set(tokenizer.eos_token_ids) & tokenizer.special_ids
    assert len(ids) > 150  # bytes that go on a character can't come first
    assert allowed >> tokenizer.vocab_size == 0


def test_the_model_s_own_ends_count(tmp_path: Path) -> None:
    tokenizer = byte_level()
    (end,) = tokenizer.eos_token_ids
    other = min(tokenizer.special_ids - {end})
    table = token_table(tokenizer, frozenset({other, 10**6}))
    assert set(table.eos_tokens) == {end, other}
    matcher = compile_matcher(table, StructuredOutputs(regex="a?"))
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    assert allowed >> end & allowed >> other & 1


def test_a_tokenizer_that_is_not_understood_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    words = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    monkeypatch.setattr(tokenizer, "to_json", words.to_str)
    with pytest.raises(GrammarError, match="tokenizer can't be used"):
        token_table(tokenizer, frozenset())
