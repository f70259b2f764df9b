from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import DEMO_MODEL
from tests.worker.text_models import byte_level, sentencepiece
from worker.text.detokenize import Detokenizer
from worker.text.tokenizer import Tokenizer

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte-level": byte_level, "sentencepiece": sentencepiece}
if DEMO_MODEL.exists():
    TOKENIZERS["demo"] = lambda: Tokenizer.from_path(DEMO_MODEL)
# Without control characters and unassigned planes: the demo model's vocabulary lacks some of their bytes.
TEXT = st.characters(categories=("L", "M", "N", "P", "S", "Zs"), max_codepoint=0x1FAFF)
_loaded: dict[str, Tokenizer] = {}


def tokenizer_named(name: str) -> Tokenizer:
    if name not in _loaded:
        _loaded[name] = TOKENIZERS[name]()
    return _loaded[name]


def stream(tokenizer: Tokenizer, groups: Sequence[Sequence[int]], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def test_demo_model_is_among_the_tokenizers_when_it_must_be(demo_model: Path) -> None:
    assert ("demo" in TOKENIZERS) == demo_model.exists()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decoding_at_once_for_any_ids(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_named(name)
    # The first ids hold special tokens and single bytes: the hard cases, so draw from them often.
    some_id = st.one_of(
        st.integers(0, min(300, tokenizer.vocab_size - 1)), st.integers(0, tokenizer.vocab_size + 3)
    )
    groups = data.draw(st.lists(st.lists(some_id, max_size=4), max_size=12))
    texts = stream(tokenizer, groups, skip)
    assert "".join(texts) == tokenizer.decode([token for group in groups for token in group], skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(TEXT, max_size=40))
def test_text_survives_the_way_there_and_back_token_by_token(name: str, text: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = stream(tokenizer, [[token] for token in ids], skip=False)
    # Valid text comes back whole, and no step shows half a character.
    assert "".join(texts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in texts)


def test_emoji_split_over_tokens_appears_once_and_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a👍🏽b", add_special_tokens=False)
    assert len(ids) == 10
    assert [text for text in stream(tokenizer, [[i] for i in ids], True) if text] == ["a", "👍", "🏽", "b"]


def test_bytes_that_can_no_longer_complete_are_replaced_at_once() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([0xE4]) == ""
    assert detokenizer.pending == b"\xe4"
    assert detokenizer.push([ord("x")]) == "\ufffdx"
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_between_the_bytes_of_a_character_do_not_break_it() -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_ids[0]
    assert stream(tokenizer, [[0xC3], [end], [0xA9]], True) == ["", "", "é", ""]


def test_sentencepiece_drops_only_the_first_space_and_none_when_it_continues_text() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[0]) == b" hello"
    assert "".join(stream(tokenizer, [[i] for i in ids], True)) == "hello world"
    continued = Detokenizer(tokenizer, continuation=True)
    assert continued.push(ids) == " hello world"


def test_memory_does_not_grow_with_the_answer() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    for _ in range(10_000):
        assert detokenizer.push([0xF0, 0x9F, 0x91]) == ""
        assert len(detokenizer.pending) == 3
        assert detokenizer.push([0x8D]) == "👍"
        assert detokenizer.pending == b""
