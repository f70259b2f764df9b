"""A gateway's view of the keys: all of them in memory, never older than `POLL_EVERY` when one is asked for.

A look-up that comes later than that after the last look at the file looks first. So changes need no task in
the background to be seen, and the cost is one `stat` and one `PRAGMA data_version` per interval. A key that
isn't known is looked for at once: a new one counts from its first request on. What isn't a key is never
stored: garbage makes nothing grow.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from gateway.identity.errors import StoreUnusable, keys_unavailable
from gateway.identity.identity import Identity
from gateway.identity.record import KeyRecord
from gateway.identity.store import Change, KeyStore

POLL_EVERY = 0.1  # seconds a change may go unseen
UNREADABLE_LIMIT = 60.0  # seconds that known keys outlive a file that can't be read

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as requests are checked against it. `expires`: Unix time, infinity for never."""

    digest: bytes = field(repr=False)
    identity: Identity
    expires: float
    revoked: bool


class KeyRing:
    """The keys of the file `path`, for one event loop. A file that isn't there has no keys, until it is.

    StoreUnusable when the file is there and can't be read at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[bytes, Entry] = {}
        self._store: KeyStore | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the open store
        self._version = 0
        self._change = 0
        self._looked_at = time.monotonic()
        self._failing_since: float | None = None
        self._complaint = ""
        try:
            self._look()
        except StoreUnusable:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key_id: bytes) -> Entry | None:
        """The key with that id, also a revoked or expired one. ApiError 503 when the file could not be read
        for `UNREADABLE_LIMIT` seconds."""
        now = time.monotonic()
        entry = self._entries.get(key_id)
        is_new = entry is None and self._failing_since is None
        if is_new or now - self._looked_at >= POLL_EVERY:
            self._looked_at = now
            self._try_to_look(now)
            entry = self._entries.get(key_id)
        if self._failing_since is not None and now - self._failing_since >= UNREADABLE_LIMIT:
            raise keys_unavailable()
        return entry

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = self._file = None

    def _try_to_look(self, now: float) -> None:
        """What is known stays in force while the file can't be read, but not for ever: a revocation must not
        be lost."""
        try:
            self._look()
        except StoreUnusable as error:
            if self._failing_since is None:
                self._failing_since = now
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("%s; the keys known so far go on for %g s", error, UNREADABLE_LIMIT)
            self.close()
        else:
            if self._failing_since is not None:
                self._failing_since, self._complaint = None, ""
                log.info("the keys in %s can be read again", self._path)

    def _look(self) -> None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self.close()
            if self._entries:
                log.warning("%s is gone, and with it every API key", self._path)
                self._entries = {}
            return
        except OSError as error:
            raise StoreUnusable(f"the keys in {self._path} can't be used: {error}") from None
        file = (status.st_dev, status.st_ino)
        if self._store is None or file != self._file:
            self.close()
            self._store, self._file = KeyStore(self._path), file
            self._version = self._store.version()
            self._replace_all(self._store)
            return
        version = self._store.version()
        if version == self._version:
            return
        changes = self._store.changes(self._change)
        if changes:
            for change in changes:
                self._apply(self._entries, change)
            self._change = changes[-1].number
        else:  # not by a command of ours: somebody edited the file or put a backup into it
            self._replace_all(self._store)
        self._version = version

    def _replace_all(self, store: KeyStore) -> None:
        entries: dict[bytes, Entry] = {}
        changes = store.changes(0)
        for change in changes:
            self._apply(entries, change)
        self._change = changes[-1].number if changes else 0
        self._entries = entries

    def _apply(self, entries: dict[bytes, Entry], change: Change) -> None:
        key_id = change.id.encode()
        if change.record is None:
            log.error("the key %s in %s can't be read and is not accepted", change.id, self._path)
            entries.pop(key_id, None)
        else:
            entries[key_id] = _entry(change.digest, change.record)


def _entry(digest: bytes, record: KeyRecord) -> Entry:
    identity = Identity(
        user=record.user,
        key_id=record.id,
        models=None if record.models is None else frozenset(record.models),
        priority=record.priority,
        limits=record.limits,
    )
    expires = float("inf") if record.expires is None else record.expires
    return Entry(digest, identity, expires, record.revoked is not None)
