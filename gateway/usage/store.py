"""Sums per hour, user, key and model: one SQLite file in the state directory, added to by every gateway.

A gateway adds what it has gathered in one transaction, by upserts that add up over processes. WAL: readers
and writers don't wait for each other. A process that is killed loses what it had not added yet, a machine
that loses its power may lose the last seconds; the file itself stays whole.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from gateway import sqlite_file

USAGE_FILE = "usage.db"  # in the state directory
HOUR = 3600
DAY = 24 * HOUR
BUSY_SECONDS = 1.0

Group = Literal["hour", "day", "user", "key", "model"]
Row = tuple[int, str, str, str]  # hour as Unix time, user, key id ("" for none), model
Sums = list[int]  # in the order of `COUNTS`

COUNTS = ("requests", "failed", "refused", "prompt_tokens", "completion_tokens", "cached_tokens")

_APPLICATION_ID = 0x70667573  # "pfus"
_SCHEMA_VERSION = 2
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE usage (
    hour INTEGER NOT NULL,
    user TEXT NOT NULL,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    {", ".join(f"{count} INTEGER NOT NULL DEFAULT 0" for count in COUNTS)},
    PRIMARY KEY (hour, user, key, model)
) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""
_ADD = f"""
INSERT INTO usage (hour, user, key, model, {", ".join(COUNTS)}) VALUES ({", ".join("?" * (4 + len(COUNTS)))})
ON CONFLICT DO UPDATE SET {", ".join(f"{count} = {count} + excluded.{count}" for count in COUNTS)}
"""
# By the version that a file has: to the next one. Older gateways go on adding to the file they have open.
_UPGRADES = {1: "ALTER TABLE usage ADD COLUMN refused INTEGER NOT NULL DEFAULT 0"}
# The hours that aren't a day's first; `fold` puts each into that.
_OLD_HOUR = f"SELECT hour FROM usage WHERE hour >= ? AND hour < ? AND hour % {DAY} != 0 ORDER BY hour LIMIT 1"
_FOLD = f"""
INSERT INTO usage (hour, user, key, model, {", ".join(COUNTS)})
SELECT hour - hour % {DAY}, user, key, model, {", ".join(COUNTS)} FROM usage WHERE hour = ?
ON CONFLICT DO UPDATE SET {", ".join(f"{count} = {count} + excluded.{count}" for count in COUNTS)}
"""
_GROUPS: dict[Group, str] = {
    "hour": "strftime('%Y-%m-%d %H:00', hour, 'unixepoch')",
    "day": "strftime('%Y-%m-%d', hour, 'unixepoch')",
    "user": "user",
    "key": "key",
    "model": "model",
}


class UsageUnusable(Exception):
    """The file of usage can't be read or written."""


class Total(NamedTuple):
    """`group`: values of what was grouped by, in that order; the rest: sums over the group."""

    group: tuple[str, ...]
    requests: int
    failed: int
    refused: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class UsageStore:
    """The file at `path`, opened when it is first used; for one thread. UsageUnusable from every method
    when it can't be used; the next call tries again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        self._folded = 0  # no hour before this one is left to be folded

    def add(self, rows: dict[Row, Sums]) -> None:
        """Adds to the sums, all or nothing. Makes the file when there is none."""
        with self._translated():
            db = self._open(create=True)
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_ADD, [(*row, *sums) for row, sums in rows.items()])

    def fold(self, before: float) -> bool:
        """Puts one hour of a day that ended before that Unix time into its day's first; sums over days are
        the same at every moment. Whether there was one: then there may be more."""
        with self._translated():
            db = self._open(create=False)
            with db:
                db.execute("BEGIN IMMEDIATE")
                found = db.execute(_OLD_HOUR, (self._folded, int(before) // DAY * DAY)).fetchone()
                if found is None:
                    return False
                db.execute(_FOLD, found)
                db.execute("DELETE FROM usage WHERE hour = ?", found)
            self._folded = found[0]
        return True

    def totals(
        self,
        by: Iterable[Group],
        *,
        since: float | None = None,
        until: float | None = None,
        user: str | None = None,
        key: str | None = None,
        model: str | None = None,
    ) -> list[Total]:
        """Sums by `by`, in its order. Whole hours: the ones that `since` and `until` (Unix times) are in
        count, that of `until` only if it has begun before. A day that was folded counts as its first hour."""
        conditions: list[tuple[str, float | str | None]] = [
            ("hour >= ?", None if since is None else since // HOUR * HOUR),
            ("hour < ?", until),
            ("user = ?", user),
            ("key = ?", key),
            ("model = ?", model),
        ]
        chosen = [(text, value) for text, value in conditions if value is not None]
        where = " AND ".join(["true", *(text for text, _ in chosen)])
        columns = [_GROUPS[group] for group in by]
        sums = ", ".join(f"coalesce(sum({count}), 0)" for count in COUNTS)
        query = f"SELECT {', '.join([*columns, sums])} FROM usage WHERE {where}"
        if columns:
            places = ", ".join(str(place + 1) for place in range(len(columns)))
            query += f" GROUP BY {places} ORDER BY {places}"
        with self._translated():
            found = self._open(create=False).execute(query, [value for _, value in chosen]).fetchall()
        width = len(columns)
        return [Total(tuple(row[:width]), *row[width:]) for row in found]

    def close(self) -> None:
        if self._db is not None:
            if not self._is_current():
                sqlite_file.put_log_into_file(self._db)  # whoever moved it away has all of it
            self._db.close()
        self._db = self._file = None

    def _open(self, create: bool) -> sqlite3.Connection:
        """The file that the path means now: one that was deleted or moved away gets no more."""
        if self._db is not None and self._is_current():
            return self._db
        self.close()
        if create and not self._path.exists():
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            sqlite_file.make(self._path, _SCHEMA)
        file = os.stat(self._path)  # before it is opened: if it is replaced meanwhile, the next call sees it
        db = sqlite_file.connect(self._path, BUSY_SECONDS)
        try:
            _upgrade(db)
            sqlite_file.check(db, self._path, _APPLICATION_ID, _SCHEMA_VERSION, "usage")
            db.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            db.close()
            raise
        self._db, self._file = db, file
        return db

    def _is_current(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.stat(self._path), self._file)
        except OSError:
            return False

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite_file.WrongFile as error:
            raise UsageUnusable(str(error)) from None
        except (sqlite3.Error, OSError) as error:
            self.close()
            passes = isinstance(error, (sqlite3.OperationalError, OSError)) and not self._path.is_dir()
            hint = "" if passes else "; move it away, and another is made"
            raise UsageUnusable(f"the usage in {self._path} can't be used: {error}{hint}") from None


def _upgrade(db: sqlite3.Connection) -> None:
    """To this version's format, if it is an older one of ours."""

    def read(pragma: str) -> int:
        return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])

    if read("application_id") != _APPLICATION_ID or read("user_version") not in _UPGRADES:
        return
    with db:
        db.execute("BEGIN IMMEDIATE")
        while (version := read("user_version")) in _UPGRADES:  # another process may have done it just now
            db.execute(_UPGRADES[version])
            db.execute(f"PRAGMA user_version = {version + 1}")
