"""What stands between the marks of a format: one call, a list of them, or several with semicolons between."""

from __future__ import annotations

from typing import Final, Literal

from worker.text.answer import Part
from worker.text.calls.format import Mark
from worker.text.calls.json_call import CallReader
from worker.text.calls.reading import Functions

_WHITE: Final = " \t\r\n"
_SEPARATOR: Final = {"object": "", "list": ",", "sequence": ";"}


class PayloadReader:
    """Reads JSON that follows a mark (see PayloadState).

    Args:
        names: the functions that are offered.
    """

    def __init__(self, mark: Mark, names: Functions) -> None:
        self.state: Literal["open", "call", "between", "close", "over", "broken"] = "open"
        self.rest = ""
        self._mark = mark
        self._names = names if mark.only_known else None
        self._before = ""  # text before the call that is being read, no call's part
        self._text = ""
        self._call = self._new_call()

    def push(self, text: str) -> list[Part]:
        """The calls' parts that `text` brings."""
        parts: list[Part] = []
        self._text += text
        if self.state == "open":
            self._open()
        while self.state in ("call", "between"):
            moved = self._read_call(parts) if self.state == "call" else self._between()
            if not moved:
                break
        if self.state == "close":
            self._close()
        return parts

    def finish(self) -> list[Part]:
        """The parts that were held; the payload is over or broken then."""
        parts: list[Part] = []
        if self.state == "open":
            self._break(self._text)
        elif self.state == "call":
            parts, rest = self._call.finish()
            after_call = self._before == _SEPARATOR[self._mark.payload] != ""
            if self._call.state == "broken" and not (after_call and not rest.strip(_WHITE)):
                self._break(rest)
        if self.state != "broken":
            self.state = "over"
        return parts

    def _new_call(self) -> CallReader:
        return CallReader(self._names, self._mark.start, self._mark.end)

    def _open(self) -> None:
        if self._mark.payload == "list":
            text = self._text.lstrip(_WHITE)
            if not text:
                return
            if text[0] != "[":
                self._break(self._text)
                return
            after = len(self._text) - len(text) + 1
            self._before, self._text = self._text[:after], self._text[after:]
        self.state = "call"

    def _read_call(self, parts: list[Part]) -> bool:
        """Whether the call is over."""
        text, self._text = self._text, ""
        made, rest = self._call.push(text)
        parts += made
        if self._call.state == "broken":
            self._break(rest)
        elif self._call.state == "over":
            self._text = rest
            self.state = "between"
        return self.state == "between"

    def _between(self) -> bool:
        """Whether it is known what comes after a call: another one, or the end."""
        separator = _SEPARATOR[self._mark.payload]
        text = self._text.lstrip(_WHITE)
        if separator and not text:
            return False
        if separator and text[0] == separator:
            self._before, self._text = separator, text[1:]
            self._call = self._new_call()
            self.state = "call"
        else:
            self.state = "close"
        return True

    def _close(self) -> None:
        """Past the brackets and the mark that end it, as far as they are there."""
        text = self._text
        if self._mark.payload == "list":
            text = text.lstrip(_WHITE).removeprefix("]")
        end = self._mark.end
        if end:
            stripped = text.lstrip(_WHITE + "}]")
            if len(stripped) < len(end) and end.startswith(stripped):
                return
            text = stripped[len(end) :] if stripped.startswith(end) else text
        self.rest, self._text = text, ""
        self.state = "over"

    def _break(self, text: str) -> None:
        self.rest, self._text = self._before + text, ""
        self.state = "broken"
