"""Reading the audit file while others write and rotate it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gateway.usage.audit_file import rotated
from gateway.usage.record import AuditLine

POLL_SECONDS = 0.2
_BLOCK = 64 * 1024

Wanted = Callable[[AuditLine], bool]
Entry = tuple[bytes, AuditLine]  # a line as it is written, and what it says

_decoder = msgspec.json.Decoder(AuditLine)


class AuditTail:
    """The end of the audit file at `path`, and what is added to it. FileNotFoundError when there is none."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path = path
        self._wanted = wanted
        self._descriptor = os.open(path, os.O_RDONLY)
        self._position = os.fstat(self._descriptor).st_size
        self._part = b""

    def last(self, count: int) -> list[Entry]:
        """The last `count` wanted lines before this was opened, oldest first; also of files moved away."""
        found: list[Entry] = []
        for line in self._backwards():
            if len(found) >= count:
                break
            found += self._entries([line])
        return found[::-1]

    def follow(self) -> Iterator[Entry]:
        """Wanted lines as they come, for ever."""
        while True:
            yield from self._new()
            if self._replaced():
                yield from self._new()  # what came last, before it was moved away
                self._reopen()
            else:
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        os.close(self._descriptor)

    def _backwards(self) -> Iterator[bytes]:
        yield from _lines_backwards(self._descriptor, self._position)
        number = 1
        while True:
            try:
                descriptor = os.open(rotated(self._path, number), os.O_RDONLY)
            except FileNotFoundError:
                return
            try:
                yield from _lines_backwards(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            number += 1

    def _new(self) -> Iterator[Entry]:
        if os.fstat(self._descriptor).st_size < self._position:  # cut by logrotate's copytruncate
            self._position, self._part = 0, b""
        while piece := os.pread(self._descriptor, _BLOCK, self._position):
            self._position += len(piece)
            *lines, self._part = (self._part + piece).split(b"\n")
            yield from self._entries(lines)

    def _replaced(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # moved away again; the next one comes
            descriptor = os.open(self._path, os.O_RDONLY)
            self.close()
            self._descriptor, self._position, self._part = descriptor, 0, b""

    def _entries(self, lines: list[bytes]) -> Iterator[Entry]:
        for line in lines:
            try:
                entry = _decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # not ours
            if self._wanted(entry):
                yield line, entry


def _lines_backwards(descriptor: int, end: int) -> Iterator[bytes]:
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK)
        rest = os.pread(descriptor, end - start, start) + rest
        end = start
        first, *lines = rest.split(b"\n")
        yield from reversed(lines)
        rest = first
    yield rest
