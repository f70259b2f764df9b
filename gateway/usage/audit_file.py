"""The audit file: whole lines, appended by several processes at once, moved away when they are many.

Who writes or rotates holds a lock on the open file and has seen that its path still means that file; so a
rotation by another gateway or by logrotate (either of its ways) is followed before the next line.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from pathlib import Path

LOCK_SECONDS = 1.0  # a process that was stopped with the lock in its hand must not stop the others
_MODE = 0o600
_FLAGS = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
)  # a FIFO nobody reads: an error

log = logging.getLogger(__name__)


class AuditFile:
    """The file at `path`: over `max_size` bytes it becomes PATH.1 (and .1 becomes .2 … up to .`keep`).

    Opened at the first `append`. What isn't a regular file (/dev/stdout) is never rotated; one that can't be
    moved away, as its directory is somebody else's, grows on.
    """

    def __init__(self, path: Path, max_size: int, keep: int) -> None:
        self.path = path
        self._max_size = max_size
        self._keep = keep
        self._descriptor = -1
        self._stays = False  # it should be moved away and can't be

    def append(self, lines: bytes) -> None:
        """Writes all of `lines`, or nothing and raises OSError."""
        locked = self._lock()
        try:
            status = os.fstat(self._descriptor)
            is_file = stat.S_ISREG(status.st_mode)
            if locked and is_file and status.st_size and status.st_size + len(lines) > self._max_size:
                self._try_to_rotate()
                locked = self._lock()
                status = os.fstat(self._descriptor)
            self._write(lines, status.st_size if locked and is_file else None)
        finally:
            if locked and self._descriptor >= 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, lines: bytes, size: int | None) -> None:
        """`size`: of the file, if nobody else can change it; a part of a line that the disk had no room for
        is then taken back."""
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:])
        except OSError:
            if written and size is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, size)
            raise

    def _lock(self) -> bool:
        """Opens the file that `path` means now, and locks it; False when somebody else holds it too long,
        or it is of a kind that can't be locked."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            if self._descriptor < 0:
                self._descriptor = self._open()
            locked = self._try_lock()
            if self._is_current():
                if locked is not False or time.monotonic() >= deadline:
                    return bool(locked)
                time.sleep(0.005)
            else:
                self.close()  # and with it the lock

    def _try_lock(self) -> bool | None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        try:
            return os.open(self.path, _FLAGS, _MODE)
        except FileNotFoundError:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self.path, _FLAGS, _MODE)

    def _try_to_rotate(self) -> None:
        try:
            self._rotate()
        except OSError as error:
            if not self._stays:
                log.error("the audit file %s can't be moved away and grows on: %s", self.path, error)
            self._stays = True
        else:
            self._stays = False

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(rotated(self.path, number), rotated(self.path, number + 1))
        with contextlib.suppress(FileNotFoundError):  # moved away by logrotate just now
            os.replace(self.path, rotated(self.path, 1))
        self.close()


def rotated(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
