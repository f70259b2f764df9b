"""SQLite files of a fleet's state directory: made whole or not at all, and told apart by their marks."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path


class WrongFile(Exception):
    """A file that holds something else, or what another version wrote."""


def connect(path: Path, timeout: float) -> sqlite3.Connection:
    """The file that is there, for reading and writing (a reader too writes, to the index of the WAL), with
    explicit transactions. `timeout`: seconds to wait for another one's write."""
    uri = path.absolute().as_uri() + "?mode=rw"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout)


def make(path: Path, schema: str) -> None:
    """An empty file appears whole or not at all, however many make one at once; its owner only reads it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # mode 0600
    os.close(descriptor)
    try:
        with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.executescript(schema)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def check(db: sqlite3.Connection, path: Path, application: int, version: int, content: str) -> None:
    """WrongFile unless the file has these marks; `content` says what it should hold."""
    (found,) = db.execute("PRAGMA application_id").fetchone()
    if found != application:
        raise WrongFile(f"{path} is no file of {content}; move it away")
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found != version:
        raise WrongFile(f"{path} has format {found}; this version of pagefleet knows {version} only")
