"""A gateway's view of the keys follows the file: at once, in every process, through what happens to it."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from contracts.errors import ApiError
from gateway.identity import keyring
from gateway.identity.errors import StoreUnusable
from gateway.identity.keyring import POLL_EVERY, UNREADABLE_LIMIT, KeyRing
from gateway.identity.store import KeyStore

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


@pytest.fixture
def store(path: Path) -> Iterator[KeyStore]:
    with KeyStore(path, create=True, write=True) as store:
        yield store


@pytest.fixture
def ring(store: KeyStore, path: Path) -> Iterator[KeyRing]:
    ring = KeyRing(path)
    yield ring
    ring.close()


def find(ring: KeyRing, key_id: str) -> keyring.Entry | None:
    """As a request after a pause finds it: the ring looks first."""
    ring._looked_at -= POLL_EVERY
    return ring.find(key_id.encode())


def test_changes_are_seen_by_the_next_request_after_the_interval(store: KeyStore, ring: KeyRing) -> None:
    record, _ = store.create("alice", models=["m"], priority="high")
    time.sleep(POLL_EVERY)
    entry = ring.find(record.id.encode())
    assert entry is not None
    assert (entry.identity.user, entry.identity.key_id) == ("alice", record.id)
    assert (entry.identity.models, entry.identity.priority) == (frozenset({"m"}), "high")
    assert entry.expires == float("inf")
    _, new, _ = store.rotate(record.id, grace=60)
    entry = find(ring, record.id)
    assert entry is not None
    assert time.time() < entry.expires < time.time() + 61
    assert ring.find(new.id.encode()) is not None
    store.revoke([new.id])
    entry = find(ring, new.id)
    assert entry is not None
    assert entry.revoked
    assert entry.digest.hex() not in repr(entry)
    assert repr(entry.digest) not in repr(entry)


def test_within_the_interval_only_a_key_that_is_not_known_is_looked_for(
    store: KeyStore, ring: KeyRing, monkeypatch
) -> None:
    monkeypatch.setattr(keyring.time, "monotonic", lambda: ring._looked_at + POLL_EVERY / 2)
    known = store.create("alice")[0].id.encode()
    assert ring.find(known) is not None  # as soon as it was made
    looks = []
    monkeypatch.setattr(ring, "_look", lambda: looks.append(1))
    for _ in range(1000):
        ring.find(known)
    assert looks == []
    ring.find(b"x")
    assert looks == [1]


def test_unknown_ids_make_nothing_grow(store: KeyStore, ring: KeyRing) -> None:
    store.create("alice")
    find(ring, "x")
    for number in range(20_000):
        ring.find(b"%010d" % number)
    assert len(ring) == 1


def test_many_keys_are_read_once_and_changes_alone(store: KeyStore, path: Path, monkeypatch) -> None:
    records = [store.create(f"user{n}")[0] for n in range(300)]
    ring = KeyRing(path)
    assert len(ring) == 300
    asked = []
    original = KeyStore.changes
    monkeypatch.setattr(KeyStore, "changes", lambda self, after: asked.append(after) or original(self, after))
    store.revoke([records[7].id])
    entry = find(ring, records[7].id)
    assert entry is not None
    assert entry.revoked
    assert find(ring, records[8].id) is not None
    assert asked == [300]
    ring.close()


# --- the file comes, goes, and is edited


def test_a_store_that_is_made_later_is_found(path: Path) -> None:
    ring = KeyRing(path)
    assert find(ring, "x") is None
    with KeyStore(path, create=True, write=True) as store:
        record, _ = store.create("alice")
    assert find(ring, record.id) is not None
    ring.close()


def test_without_the_file_there_are_no_keys(store: KeyStore, path: Path, ring: KeyRing, caplog) -> None:
    record, _ = store.create("alice")
    assert find(ring, record.id) is not None
    for file in path.parent.glob("keys.db*"):
        file.unlink()
    assert find(ring, record.id) is None
    assert "is gone" in caplog.text


def test_a_file_put_in_its_place_is_the_truth(store: KeyStore, path: Path, ring: KeyRing, tmp_path) -> None:
    old, _ = store.create("alice")
    assert find(ring, old.id) is not None
    other = tmp_path / "other.db"
    with KeyStore(other, create=True, write=True) as another:
        new, _ = another.create("bob")
    for file in path.parent.glob("keys.db?*"):
        file.unlink()
    os.replace(other, path)
    assert find(ring, new.id) is not None
    assert ring.find(old.id.encode()) is None


def test_edits_and_backups_in_place_are_seen(store: KeyStore, path: Path, ring: KeyRing, tmp_path) -> None:
    kept, _ = store.create("alice")
    with sqlite3.connect(tmp_path / "backup.db") as backup, sqlite3.connect(path) as db:
        db.backup(backup)
    later, _ = store.create("bob")
    assert find(ring, later.id) is not None
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("UPDATE keys SET revoked = 1 WHERE id = ?", (kept.id,))
    entry = find(ring, kept.id)
    assert entry is not None
    assert entry.revoked
    with sqlite3.connect(tmp_path / "backup.db") as backup, sqlite3.connect(path) as db:
        backup.backup(db)
    entry = find(ring, kept.id)
    assert entry is not None
    assert not entry.revoked
    assert ring.find(later.id.encode()) is None


def test_a_row_edited_into_nonsense_is_not_accepted(
    store: KeyStore, path: Path, ring: KeyRing, caplog
) -> None:
    broken, _ = store.create("alice")
    good, _ = store.create("bob")
    assert find(ring, broken.id) is not None
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("UPDATE keys SET models = 'all of them' WHERE id = ?", (broken.id,))
    assert find(ring, broken.id) is None
    assert ring.find(good.id.encode()) is not None
    assert f"the key {broken.id} in" in caplog.text


def test_an_unreadable_file_at_the_start_is_an_error(path: Path) -> None:
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(StoreUnusable, match="keys\\.db"):
        KeyRing(path)


def test_known_keys_outlive_an_unreadable_file_for_a_while(
    store: KeyStore, path: Path, ring: KeyRing, caplog
) -> None:
    record, _ = store.create("alice")
    assert find(ring, record.id) is not None
    good = path.with_name("good")
    with sqlite3.connect(good) as copy, sqlite3.connect(path) as db:
        db.backup(copy)
    nonsense = path.with_name("nonsense")
    nonsense.write_bytes(b"nonsense" * 1000)
    os.replace(nonsense, path)
    for _ in range(3):
        assert find(ring, record.id) is not None
    assert caplog.text.count("go on for 60 s") == 1
    assert ring._failing_since is not None
    ring._failing_since -= UNREADABLE_LIMIT
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            find(ring, record.id)
        with pytest.raises(ApiError):  # also between two looks
            ring.find(record.id.encode())
        assert (caught.value.status, caught.value.code) == (503, "keys_unavailable")
    os.replace(good, path)
    assert find(ring, record.id) is not None


# --- several gateways


def _gateway(path: Path, key_id: str, pipe: Connection) -> None:
    """Asks for a key again and again; tells when it has it, and when it is refused it."""
    ring = KeyRing(path)
    while ring.find(key_id.encode()) is None:
        time.sleep(0.005)
    pipe.send("known")
    while True:
        entry = ring.find(key_id.encode())
        assert entry is not None
        if entry.revoked:
            pipe.send(time.monotonic())  # one clock for all processes of a machine
            return
        time.sleep(0.001)


def test_a_revocation_reaches_every_gateway_process(store: KeyStore, path: Path) -> None:
    record, _ = store.create("alice")
    pipes, processes = [], []
    for _ in range(3):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_gateway, args=(path, record.id, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.poll(120)
        assert pipe.recv() == "known"
    store.revoke([record.id])
    revoked = time.monotonic()
    delays = []
    for pipe in pipes:
        assert pipe.poll(60)
        delays.append(pipe.recv() - revoked)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    # The bound is POLL_EVERY; the rest is a machine that others load.
    assert max(delays) < 20.0
