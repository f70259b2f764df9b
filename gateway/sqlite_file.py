"""SQLite files of a fleet's state directory: made whole or not at all, and told apart by their marks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MAKING_SECONDS = 5.0  # a process that was stopped while it made a file must not stop the others
_BESIDE = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a file, found by name alone


class WrongFile(Exception):
    """A file that holds something else, or what another version wrote."""


def connect(path: Path, timeout: float) -> sqlite3.Connection:
    """The file that is there, for reading and writing (a reader too writes, to the index of the WAL), with
    explicit transactions. `timeout`: seconds to wait for another one's write."""
    uri = path.absolute().as_uri() + "?mode=rw"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout)


def make(path: Path, schema: str) -> None:
    """An empty file appears whole or not at all, however many make one at once; its owner only reads it.

    What is left of one that was deleted or moved away while it was open goes first: SQLite would take its
    log for the new file's, and put old pages into that.
    """
    with _one_maker(path.parent):
        if path.exists():
            return
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # mode 0600
        os.close(descriptor)
        try:
            with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as db:
                db.executescript(schema)
            for ending in _BESIDE:
                path.with_name(path.name + ending).unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)


def put_log_into_file(db: sqlite3.Connection) -> None:
    """So that the file is whole by itself, whatever becomes of its name; as far as others let it."""
    with contextlib.suppress(sqlite3.Error):
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextlib.contextmanager
def _one_maker(directory: Path) -> Iterator[None]:
    """At a time, over all processes: nobody takes away what belongs to another's new file already.
    BlockingIOError after `MAKING_SECONDS`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ends_at = time.monotonic() + MAKING_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= ends_at:
                    raise
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def check(db: sqlite3.Connection, path: Path, application: int, version: int, content: str) -> None:
    """WrongFile unless the file has these marks; `content` says what it should hold."""
    (found,) = db.execute("PRAGMA application_id").fetchone()
    if found != application:
        raise WrongFile(f"{path} is no file of {content}; move it away")
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found != version:
        raise WrongFile(f"{path} has format {found}; this version of pagefleet knows {version} only")
