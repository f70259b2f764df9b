"""Reading the audit file while others write and rotate it.

Whoever reads holds the lock that writers hold: so no line is seen in part, nor one that is taken back as the
disk is full, and a file that was moved away is left when its last line has been read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gateway.usage.audit_file import LOCK_SECONDS, rotated
from gateway.usage.record import AuditLine

POLL_SECONDS = 0.2
_BLOCK = 64 * 1024

Wanted = Callable[[AuditLine], bool]
Entry = tuple[bytes, AuditLine]  # a line as it is written, and what it says

_decoder = msgspec.json.Decoder(AuditLine)


class AuditTail:
    """The end of the audit file at `path`, and what is added to it. OSError when there is none, or something
    else is there."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path = path
        self._wanted = wanted
        self._descriptor = _open(path)
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
        """Wanted lines as they come, for ever; also of files that were moved away since, up to as many as are
        kept."""
        while True:
            yield from self._new()
            if self._replaced():
                yield from self._new()  # what came last, before it was moved away
                if self._went_on():
                    continue
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        os.close(self._descriptor)

    def _backwards(self) -> Iterator[bytes]:
        yield from _lines_backwards(self._descriptor, self._position)
        status = os.fstat(self._descriptor)
        seen = {(status.st_dev, status.st_ino)}
        number = 0
        while True:
            number += 1
            try:
                descriptor = os.open(rotated(self._path, number), os.O_RDONLY)
            except FileNotFoundError:
                return
            try:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) not in seen:  # else they were moved on meanwhile
                    seen.add((status.st_dev, status.st_ino))
                    yield from _lines_backwards(descriptor, status.st_size)
            finally:
                os.close(descriptor)

    def _new(self) -> Iterator[Entry]:
        while True:
            with self._locked():
                if os.fstat(self._descriptor).st_size < self._position:  # cut by logrotate's copytruncate
                    self._position, self._part = 0, b""
                piece = os.pread(self._descriptor, _BLOCK, self._position)
            if not piece:
                return
            self._position += len(piece)
            *lines, self._part = (self._part + piece).split(b"\n")
            yield from self._entries(lines)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Against writers, for a moment; without the lock where one was stopped with it in its hand, or the
        file is of a kind that can't be locked."""
        ends_at = time.monotonic() + LOCK_SECONDS
        with contextlib.suppress(OSError):
            while True:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= ends_at:
                        break
                    time.sleep(0.002)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _replaced(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _went_on(self) -> bool:
        """To the file after this one; False in the middle of a rotation, and where it can't be read."""
        try:
            descriptor = _open(self._after())
        except OSError:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._after()), os.fstat(descriptor)):
                self.close()
                self._descriptor, self._position, self._part = descriptor, 0, b""
                return True
        os.close(descriptor)
        return False

    def _after(self) -> Path:
        """What was begun when this file was moved away: the path, unless that was moved away as well."""
        prefix = self._path.name + "."
        names = [file.name.removeprefix(prefix) for file in self._path.parent.glob(f"{glob.escape(prefix)}*")]
        after = self._path
        for number in sorted(int(name) for name in names if name.isdecimal()):
            file = rotated(self._path, number)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(file), os.fstat(self._descriptor)):
                    return after
                after = file
        return self._path

    def _entries(self, lines: list[bytes]) -> Iterator[Entry]:
        for line in lines:
            try:
                entry = _decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # not ours
            if self._wanted(entry):
                yield line, entry


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO: an error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file that can be read from its end")
    return descriptor


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
