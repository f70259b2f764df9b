"""Stop strings in a stream of text: found wherever the pieces are cut, never leaked in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed.

    The result doesn't depend on how the text is cut into pieces: the match that ends first wins, and of
    those that end at the same character the longest. Only the longest suffix that may still become a stop
    string is held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string once it is complete; after that nothing more."""
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, length, self._matched = match
            self._held = ""
            return text[: end if self._include_stop else end - length], self._matched
        keep = self._start_of_possible_stop(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text still held back, when no more is coming."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """(end, length, stop) of the match that ends first, the longest of those."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end, length = start + len(stop), len(stop)
            if best is None or (end, -length) < (best[0], -best[1]):
                best = (end, length, stop)
        return best

    def _start_of_possible_stop(self, text: str) -> int:
        """Where the longest suffix starts that begins a stop string; len(text) if none does."""
        keep = len(text)
        for stop in self._stops:
            start = max(0, len(text) - len(stop) + 1)
            while (start := text.find(stop[0], start, keep)) >= 0:
                if stop.startswith(text[start:]):
                    keep = start
                    break
                start += 1
        return keep
