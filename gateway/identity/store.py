"""The keys of a fleet: one SQLite file in the state directory, written by `pagefleet keys`, read by gateways.

Rows are never deleted. Every change gives its row the next number (`change`), so a reader fetches only what
is new. WAL: readers and the writer don't wait for each other.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gateway import sqlite_file
from gateway.identity import record, secret
from gateway.identity.errors import KeyRefused, StoreUnusable, utc
from gateway.identity.identity import NO_LIMITS, KeyLimits, Priority
from gateway.identity.record import KeyRecord

KEYS_FILE = "keys.db"  # in the state directory
WRITE_TIMEOUT = 5.0  # seconds a command waits for another one's write
READ_TIMEOUT = 0.02  # a gateway waits on its event loop, and looks again soon

_APPLICATION_ID = 0x70666B73  # "pfks"
_SCHEMA_VERSION = 1
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    user TEXT NOT NULL,
    name TEXT NOT NULL,
    models TEXT,
    priority TEXT NOT NULL,
    limits TEXT NOT NULL,
    created REAL NOT NULL,
    expires REAL,
    revoked REAL,
    rotated_from TEXT REFERENCES keys (id),
    change INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX keys_by_change ON keys (change);
CREATE INDEX keys_by_predecessor ON keys (rotated_from) WHERE rotated_from IS NOT NULL;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""
_COLUMNS = "id, user, name, models, priority, limits, created, expires, revoked, rotated_from"
_INSERT = f"""
INSERT INTO keys ({_COLUMNS}, digest, change)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(change), 0) + 1 FROM keys))
"""
_UPDATE = """
UPDATE keys SET expires = ?, revoked = ?, change = (SELECT max(change) + 1 FROM keys) WHERE id = ?
"""


class Change(NamedTuple):
    """A row as a gateway needs it; `record` is None when somebody edited the row into nonsense."""

    number: int
    id: str
    digest: bytes
    record: KeyRecord | None


class KeyStore:
    """An open file of keys, to be closed. StoreUnusable when it can't be read or isn't one.

    `create` makes the file when there is none. Without `write` a busy file is an error almost at once.
    """

    def __init__(self, path: Path, *, create: bool = False, write: bool = False) -> None:
        self._path = path
        self._write = write
        with self._translated():
            if create and not path.exists():
                sqlite_file.make(path, _SCHEMA)
            self._db = sqlite_file.connect(path, WRITE_TIMEOUT if write else READ_TIMEOUT)
        try:
            with self._translated():
                sqlite_file.check(self._db, path, _APPLICATION_ID, _SCHEMA_VERSION, "keys")
                if write and path.stat().st_mode & 0o077:
                    path.chmod(0o600)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> KeyStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """What was written is in the file itself then, which gateways would keep in its log: a copy or a
        move of the file alone has every revocation."""
        if self._write:
            sqlite_file.put_log_into_file(self._db)
        self._db.close()

    # --- for commands

    def records(self) -> list[KeyRecord]:
        """All keys, oldest first."""
        with self._translated():
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created, id").fetchall()
        return [self._record(row) for row in rows]

    def get(self, key_id: str) -> KeyRecord:
        """KeyRefused when there is no such key."""
        with self._translated():
            row = self._db.execute(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
        if row is None:
            raise KeyRefused(
                f"there is no key {key_id} in {self._path}; `pagefleet keys list --all` lists all"
            )
        return self._record(row)

    def create(
        self,
        user: str,
        *,
        name: str = "",
        models: Iterable[str] | None = None,
        priority: Priority = "normal",
        limits: KeyLimits = NO_LIMITS,
        expires: float | None = None,
    ) -> tuple[KeyRecord, str]:
        """(record, the key): the one time that it is seen. KeyRefused for what no key can have."""
        now = time.time()
        new = KeyRecord(
            id="",
            user=record.checked_user(user),
            name=record.checked_text("name", name, record.MAX_NAME),
            models=record.checked_models(models),
            priority=priority,
            limits=record.checked_limits(limits),
            created=now,
            expires=record.checked_expiry(expires, now),
        )
        with self._writing():
            return self._insert(new)

    def rotate(
        self,
        key_id: str,
        *,
        grace: float,
        expires: float | None = None,
        prepare: Callable[[str], None] = lambda new_id: None,
    ) -> tuple[KeyRecord, KeyRecord, str]:
        """(old record, new record, the new key): a successor with all that the old one has.

        The old one goes on for `grace` seconds. The new one lives until `expires`, else as long as the old
        one was to. `prepare` is called with its id before it counts; when that fails, nothing is changed.
        """
        now = time.time()
        expires = record.checked_expiry(expires, now)
        end = now + record.checked_grace(grace)
        with self._writing():
            old = self.get(key_id)
            self._check_rotatable(old, now)
            if expires is None and old.expires is not None:
                expires = now + (old.expires - old.created)
            successor = msgspec.structs.replace(
                old, created=now, expires=expires, rotated_from=old.id, revoked=None
            )
            new, key = self._insert(successor)
            prepare(new.id)
            self._update(old.id, min(end, old.expires) if old.expires is not None else end, None)
            return self.get(key_id), new, key

    def revoke(self, key_ids: Iterable[str]) -> list[KeyRecord]:
        """Ends keys for good, all or none of them; one that was revoked before stays as it is."""
        with self._writing():
            ids = list(dict.fromkeys(key_ids))
            for old in map(self.get, ids):
                if old.revoked is None:
                    self._update(old.id, old.expires, time.time())
            return [self.get(key_id) for key_id in ids]

    # --- for gateways

    def version(self) -> int:
        """Differs from the last answer when another connection has changed anything."""
        with self._translated():
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def changes(self, after: int) -> list[Change]:
        """Rows with a higher number than `after`, in order."""
        query = f"SELECT {_COLUMNS}, digest, change FROM keys WHERE change > ? ORDER BY change"
        with self._translated():
            rows = self._db.execute(query, (after,)).fetchall()
        changes = []
        for *columns, digest, number in rows:
            try:
                known = self._record(tuple(columns))
            except StoreUnusable:
                known = None
            changes.append(Change(number, columns[0], digest, known))
        return changes

    # --- inside

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite_file.WrongFile as error:
            raise StoreUnusable(str(error)) from None
        except (sqlite3.Error, OSError) as error:
            raise StoreUnusable(f"the keys in {self._path} can't be used: {error}") from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction; what it reads can't change before it ends."""
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _insert(self, new: KeyRecord) -> tuple[KeyRecord, str]:
        key_id, key = secret.new_key()
        new = msgspec.structs.replace(new, id=key_id)
        columns = msgspec.to_builtins(new)
        columns["models"] = None if new.models is None else msgspec.json.encode(new.models).decode()
        columns["limits"] = msgspec.json.encode(new.limits).decode()
        self._db.execute(_INSERT, (*columns.values(), secret.digest(key.encode())))
        return new, key

    def _update(self, key_id: str, expires: float | None, revoked: float | None) -> None:
        self._db.execute(_UPDATE, (expires, revoked, key_id))

    def _check_rotatable(self, old: KeyRecord, now: float) -> None:
        state = old.state(now)
        if state != "active":
            when = old.revoked if state == "revoked" else old.expires
            assert when is not None
            raise KeyRefused(f"the key {old.id} {_WAS[state]} at {utc(when)}; create another")
        row = self._db.execute(
            "SELECT id FROM keys WHERE rotated_from = ? AND revoked IS NULL", (old.id,)
        ).fetchone()
        if row is not None:
            raise KeyRefused(f"the key {old.id} was rotated before; its successor is {row[0]}: rotate that")

    def _record(self, row: tuple[Any, ...]) -> KeyRecord:
        columns = dict(zip(_COLUMNS.split(", "), row, strict=True))
        try:
            columns["models"] = None if columns["models"] is None else msgspec.json.decode(columns["models"])
            columns["limits"] = msgspec.json.decode(columns["limits"])
            return msgspec.convert(columns, KeyRecord)
        except (msgspec.MsgspecError, TypeError) as error:
            raise StoreUnusable(f"the key {columns['id']} in {self._path} can't be read: {error}") from None


_WAS = {"revoked": "was revoked", "expired": "expired"}
