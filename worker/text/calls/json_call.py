"""One call as a JSON object, `{"name": …, "arguments": {…}}`, read while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final, Literal, NamedTuple

from worker.text.answer import CALL_END, CallArguments, CallStart, Part, held_back

# Where the arguments are an object and come after the name, they are passed on as they come.
_HEAD: Final = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[\w.:/-]{1,128})"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.ASCII,
)
_FIRST_KEY: Final = re.compile(r'\s*\{\s*"(?P<key>[^"]*)', re.ASCII)
_KEYS: Final = ("name", "arguments", "parameters", "type", "function", "id")
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')
_WHITE: Final = " \t\r\n"


class Balance:
    """Finds where a JSON object or list ends, whatever may be wrong inside it."""

    def __init__(self) -> None:
        self.depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str, start: int = 0, floor: int = 0) -> int:
        """Where in `text`, read from `start`, the depth comes down to `floor` (just after the bracket); -1
        when it doesn't, and the next text goes on from there."""
        place = start
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, place)
            if found is None:
                return -1
            place = found.end()
            mark = found[0]
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._quoted = not self._quoted
            elif mark in "{[":
                self.depth += 1
            else:
                self.depth -= 1
                if self.depth <= floor:
                    return place
        return -1


class ParsedCall(NamedTuple):
    name: str
    arguments: str  # JSON of an object


class CallReader:
    """Reads one call. `state`: "head" until it is certain that it is one, then "arguments", "tail" (what
    follows them in the object), and "over"; or "broken": it is none.

    Args:
        names: the functions there are, where only their names tell a call from other JSON; None: any name.
        start, end: the marks around calls. Before the arguments either shows that this is no call. In the
            arguments, `end` ends the call only after a line break: JSON strings may hold it, but no breaks.
    """

    def __init__(self, names: Collection[str] | None = None, start: str = "", end: str = "") -> None:
        self.state: Literal["head", "arguments", "tail", "over", "broken"] = "head"
        self._names = names
        self._marks = [mark for mark in (start, end) if mark]
        self._cut = "\n" + end if end else ""
        self._text = ""  # what isn't decided about
        self._balance = Balance()
        self._scanned = 0

    def push(self, text: str) -> tuple[list[Part], str]:
        """The parts that `text` brings, and, once the call is over, the text after it. Once it is broken, all
        the text since its beginning comes back."""
        parts: list[Part] = []
        self._text += text
        if self.state == "head":
            self._read_head(parts)
        if self.state == "arguments":
            self._read_arguments(parts)
        if self.state == "tail":
            self._read_tail()
        rest = ""
        if self.state in ("over", "broken"):
            rest, self._text = self._text, ""
        return parts, rest

    def finish(self) -> tuple[list[Part], str]:
        """The same when no more text comes: held arguments, or what turned out to be no call."""
        text, self._text = self._text, ""
        if self.state == "head":
            self.state = "broken"
            return [], text
        if self.state == "arguments":
            self.state = "over"
            return [CallArguments(text)], ""
        self.state = "over"
        return [], ""

    def _read_head(self, parts: list[Part]) -> None:
        head = _HEAD.match(self._text)
        if head is not None:
            if self._names is not None and head["name"] not in self._names:
                self.state = "broken"
                return
            parts.append(CallStart(head["name"]))
            self._text = self._text[head.end() :]
            self._balance = Balance()
            self._balance.depth = 1
            self._scanned = 0
            self.state = "arguments"
            return
        if self._is_other_text():
            self.state = "broken"
            return
        end = self._balance.push(self._text, self._scanned)
        self._scanned = len(self._text)
        mark = self._first_mark()
        if mark >= 0 and (end < 0 or mark < end):
            self.state = "broken"
        elif end >= 0:
            self._read_whole(parts, end)

    def _is_other_text(self) -> bool:
        """Whether its beginning shows already that this is no call."""
        begun = self._text.lstrip(_WHITE)
        key = _FIRST_KEY.match(begun)
        if key is not None:
            return not any(known.startswith(key["key"]) for known in _KEYS)
        return begun[:1] not in ("", "{") or begun[1:].lstrip(_WHITE)[:1] not in ("", '"')

    def _first_mark(self) -> int:
        return min((place for mark in self._marks if (place := self._text.find(mark)) >= 0), default=-1)

    def _read_whole(self, parts: list[Part], end: int) -> None:
        """The object is here and its head wasn't the usual one: keys in another order, arguments as text."""
        call = parse_call(self._text[:end], needs_arguments=self._names is not None)
        if call is None or (self._names is not None and call.name not in self._names):
            self.state = "broken"
            return
        parts += [CallStart(call.name), CallArguments(call.arguments), CALL_END]
        self._text = self._text[end:]
        self.state = "over"

    def _read_arguments(self, parts: list[Part]) -> None:
        end = self._balance.push(self._text, self._scanned, 1)
        cut = self._text.find(self._cut) if self._cut else -1
        if cut >= 0 and (end < 0 or cut < end):
            parts.append(CallArguments(self._text[:cut]))
            self._text = self._text[cut:]
            self.state = "over"
        elif end >= 0:
            parts += [CallArguments(self._text[:end]), CALL_END]
            self._text = self._text[end:]
            self._scanned = 0
            self.state = "tail"
        else:
            keep = len(self._text) - held_back(self._text, self._cut)
            parts.append(CallArguments(self._text[:keep]))
            self._text = self._text[keep:]
            self._scanned = len(self._text)

    def _read_tail(self) -> None:
        """Other keys and the object's own bracket. Where that is missing, the call is over all the same."""
        if self._scanned == 0:
            self._text = self._text.lstrip(_WHITE)
            if not self._text:
                return
            if self._text[0] not in ",}":
                self.state = "over"
                return
        end = self._balance.push(self._text, self._scanned)
        self._scanned = len(self._text)
        mark = self._first_mark()
        if mark >= 0 and (end < 0 or mark < end):
            end = mark
        if end >= 0:
            self._text = self._text[end:]
            self.state = "over"


def parse_call(text: str, *, needs_arguments: bool) -> ParsedCall | None:
    """The call that a whole JSON object is; None when it is none."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # OpenAI's own form of a call
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    if needs_arguments and "arguments" not in value and "parameters" not in value:
        return None
    arguments = _object(value.get("arguments", value.get("parameters")))
    return None if arguments is None else ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _object(arguments: Any) -> dict[str, Any] | None:
    """Arguments are an object, also where a model writes them as text or leaves them empty."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", strict=False, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
