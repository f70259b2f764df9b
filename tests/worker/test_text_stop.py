from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.text.stop import StopMatcher


def run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[str, str | None, list[str]]:
    """All text shown, the stop found, and the text shown after each piece."""
    matcher = StopMatcher(stops, include_stop)
    shown: list[str] = []
    stopped = None
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
    return "".join(shown) + ("" if stopped else matcher.flush()), stopped, shown


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Reads character by character and stops as soon as a stop string is complete; the longest if several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("first", range(1, 6))
@pytest.mark.parametrize("second", range(1, 6))
def test_stop_split_over_three_tokens_never_leaks(first: int, second: int) -> None:
    stop = "</end>"
    cuts = sorted({first, second})
    bounds = [0, *cuts, len(stop)]
    pieces = ["answer", *(stop[a:b] for a, b in pairwise(bounds)), "leaked"]
    text, stopped, shown = run(pieces, [stop])
    assert (text, stopped) == ("answer", stop)
    assert all("<" not in part for part in shown)


@pytest.mark.parametrize("end", range(1, 6))
def test_start_of_a_stop_that_never_comes_is_flushed(end: int) -> None:
    text, stopped, shown = run(["x", "</end>"[:end]], ["</end>"])
    assert (text, stopped) == ("x" + "</end>"[:end], None)
    assert shown == ["x", ""]


def test_only_the_possible_start_is_held_back() -> None:
    matcher = StopMatcher(["abcd"])
    assert matcher.push("xxab") == ("xx", None)
    assert matcher.push("abc") == ("ab", None)
    assert matcher.push("e") == ("abce", None)
    assert matcher.flush() == ""


def test_earliest_completed_stop_wins_then_the_longest() -> None:
    assert run(["one two"], ["two", "ne"])[:2] == ("o", "ne")
    assert run(["xabc"], ["abc", "b"])[:2] == ("xa", "b")
    assert run(["xab"], ["b", "ab"])[:2] == ("x", "ab")


def test_stop_is_kept_when_asked_for() -> None:
    assert run(["a<", "/s>b"], ["</s>"], include_stop=True)[:2] == ("a</s>", "</s>")


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", ".")
    assert matcher.push("c") == ("", ".")
    assert matcher.flush() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


letters = st.text(alphabet="ab<", max_size=30)


@settings(deadline=None)
@given(
    text=letters,
    cuts=st.lists(st.integers(0, 30), max_size=8),
    stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_any_split_gives_what_reading_character_by_character_gives(
    text: str, cuts: list[int], stops: list[str], include: bool
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    shown, stopped, _ = run(pieces, stops, include)
    assert (shown, stopped) == naive(text, stops, include)


@settings(deadline=None)
@given(text=letters, stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), min_size=1, max_size=4))
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        piece, stopped = matcher.push(character)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : end]
        longest = max(
            (
                k
                for k in range(end + 1)
                if any(len(s) > k and s.startswith(text[end - k : end]) for s in stops)
            ),
            default=0,
        )
        assert held == text[end - longest : end]
