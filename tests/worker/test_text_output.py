from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.text_models import byte_level, sentencepiece
from worker.params import SamplingParams
from worker.text.output import OutputText, TokenText, token_logprob_bytes
from worker.text.tokenizer import Tokenizer

BYTES = byte_level(words=("hello", " world"))
PIECES = sentencepiece()


def run(
    tokenizer: Tokenizer, groups: list[list[int]], **params: Any
) -> tuple[str, str | None, list[TokenText], int]:
    """The whole text, the stop string, the tokens handed out, and after how many pushes it stopped."""
    output = OutputText(tokenizer, SamplingParams(max_tokens=None, **params))
    text, tokens, pushes = "", [], 0
    for group in groups:
        delta = output.push(group)
        text += delta.text
        tokens += delta.tokens
        pushes += 1
        if delta.stopped:
            break
    delta = output.finish()
    return text + delta.text, output.stopped, tokens + delta.tokens, pushes


def ids_of(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_plain_text_has_no_token_list_unless_logprobs_are_wanted() -> None:
    assert run(BYTES, [ids_of("hello world")]) == ("hello world", None, [], 1)


def test_stop_across_tokens_ends_the_text_before_it() -> None:
    groups = [[token] for token in ids_of("hello world, bye")]
    text, stopped, _, pushes = run(BYTES, groups, stop=["lo wor"])
    assert (text, stopped) == ("hel", "lo wor")
    assert pushes == 2  # "hello", " world": the rest is never looked at


def test_stop_in_the_middle_of_one_push() -> None:
    assert run(BYTES, [ids_of("hello world")], stop=[" w"])[:2] == ("hello", " w")
    included = run(BYTES, [ids_of("hello world")], stop=[" w"], include_stop_str_in_output=True)
    assert included[:2] == ("hello w", " w")


def test_min_tokens_come_through_whatever_they_spell() -> None:
    groups = [[token] for token in ids_of("...a.b")]
    assert run(BYTES, groups, stop=["."], min_tokens=3)[:2] == ("...a", ".")
    assert run(BYTES, [ids_of("...a.b")], stop=["."], min_tokens=3)[:2] == ("...a", ".")


def test_tokens_wait_for_their_text() -> None:
    output = OutputText(BYTES, SamplingParams(stop=["world!"], logprobs=0))
    hello, world, question = *ids_of("hello"), ids_of(" world")[0], ids_of("?")[0]
    assert output.push([hello]).tokens == [TokenText(0, b"hello", 0)]
    held = output.push([world])
    assert (held.text, held.tokens) == (" ", [])
    rest = output.push([question])
    assert rest.text == "world?"
    assert rest.tokens == [TokenText(1, b" world", 5), TokenText(2, b"?", 11)]


def test_a_token_cut_by_a_stop_string_keeps_the_bytes_that_show() -> None:
    text, stopped, tokens, _ = run(BYTES, [ids_of("hello world")], stop=["lo w"], logprobs=0)
    assert (text, stopped) == ("hel", "lo w")
    assert tokens == [TokenText(0, b"hel", 0)]


def test_special_tokens_left_out_of_the_text_bring_no_bytes() -> None:
    end = BYTES.eos_token_ids[0]
    text, _, tokens, _ = run(BYTES, [[*ids_of("hello"), end]], logprobs=0)
    assert text == "hello"
    assert [token.data for token in tokens] == [b"hello", b""]
    shown, _, tokens, _ = run(BYTES, [[*ids_of("hello"), end]], logprobs=0, skip_special_tokens=False)
    assert shown == "hello<|end|>" == b"".join(token.data for token in tokens).decode()


def test_leading_space_of_sentencepiece_is_missing_from_the_bytes_too() -> None:
    text, _, tokens, _ = run(PIECES, [ids_of("hello world", PIECES)], logprobs=0)
    assert text == "hello world" == b"".join(token.data for token in tokens).decode()


@settings(max_examples=400, deadline=None)
@given(data=st.data(), stops=st.lists(st.text(alphabet="ab\u00e9👍 ", min_size=1, max_size=3), max_size=3))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(data: st.DataObject, stops: list[str]) -> None:
    tokenizer = data.draw(st.sampled_from([BYTES, PIECES]))
    text = data.draw(st.text(alphabet="ab\u00e9👍 \ufffd中", max_size=12))
    some_ids = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.one_of(st.just(ids_of(text, tokenizer)), st.lists(some_ids, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    options = {"stop": stops, "min_tokens": data.draw(st.integers(0, 3))}
    shown, stopped, tokens, _ = run(tokenizer, groups, logprobs=0, **options)
    assert b"".join(token.data for token in tokens).decode("utf-8", "replace") == shown
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert len(tokens) == len(ids) or stopped is not None
    # Neither grouping nor log-probabilities change the text.
    assert run(tokenizer, [[token] for token in ids], **options)[:2] == (shown, stopped)


def test_logprob_entries_have_real_bytes() -> None:
    assert token_logprob_bytes(BYTES, *ids_of("hello")) == ("hello", list(b"hello"))
    first_of_emoji = ids_of("👍")[0]
    assert token_logprob_bytes(BYTES, first_of_emoji) == ("\ufffd", [0xF0])
    end = BYTES.eos_token_ids[0]
    assert token_logprob_bytes(BYTES, end) == ("<|end|>", [])
    assert token_logprob_bytes(BYTES, end, skip_special_tokens=False) == ("<|end|>", list(b"<|end|>"))
