"""Keys on disk: what is stored, what is refused, many writers at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import sqlite3
import stat
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from gateway.identity.errors import KeyRefused, StoreUnusable
from gateway.identity.identity import KeyLimits
from gateway.identity.record import KeyRecord
from gateway.identity.secret import KEY, id_of, new_key
from gateway.identity.store import KeyStore

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "odd #%? name.db"


@pytest.fixture
def store(path: Path):
    with KeyStore(path, create=True, write=True) as store:
        yield store


# --- keys as text


def test_keys_have_a_public_id_and_enough_entropy() -> None:
    keys = [new_key() for _ in range(200)]
    for key_id, key in keys:
        match = KEY.fullmatch(key.encode())
        assert match is not None
        assert match[1].decode() == key_id == id_of(key) == id_of(key_id) == id_of(f"pfk_{key_id}")
        assert 62 ** len(key.split("_")[2]) > 2**256
    assert len({key_id for key_id, _ in keys}) == len({key.split("_")[2] for _, key in keys}) == 200


@pytest.mark.parametrize(
    "text", ["", "pfk_", "a" * 9, "A" * 10, "sk-0123456789", "a" * 10 + "_ü", "a\n" * 10]
)
def test_what_is_no_id(text: str) -> None:
    assert id_of(text) is None


# --- what is kept


def test_a_key_is_stored_as_its_hash_only(store: KeyStore, path: Path) -> None:
    record, key = store.create("alice")
    (change,) = store.changes(0)
    assert change.digest == hashlib.sha256(key.encode()).digest()
    assert change.record == record
    secret = key.rpartition("_")[2].encode()
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    assert len(files) == 3  # with the log and its index
    for file in files:
        assert secret not in file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret.decode() not in repr(record)


def test_everything_comes_back(store: KeyStore, path: Path) -> None:
    expires = time.time() + 1000
    limits = KeyLimits(qps=0.5, burst=3, concurrency=4, tokens_per_minute=1000)
    record, _ = store.create(
        "  bob ", name="für CI", models=["a", "b/c:d", "a"], priority="high", limits=limits, expires=expires
    )
    assert record == KeyRecord(
        id=record.id,
        user="bob",
        name="für CI",
        models=("a", "b/c:d"),
        priority="high",
        limits=limits,
        created=record.created,
        expires=expires,
    )
    plain, _ = store.create("carol")
    with KeyStore(path) as other:
        assert other.get(record.id) == record
        assert other.records() == [record, plain]
    assert plain.models is None
    assert plain.expires is None


def test_a_mode_that_let_others_read_is_narrowed(store: KeyStore, path: Path) -> None:
    path.chmod(0o644)
    KeyStore(path, write=True).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user": " "}, "user must have 1 to 512"),
        ({"user": "x" * 513}, "user must have"),
        ({"user": "a\x1b[31m"}, "printable"),
        ({"user": "a\udcff"}, "printable"),
        ({"user": "a", "name": "two\nlines"}, "name must have"),
        ({"user": "a", "models": []}, "1 to 256"),
        ({"user": "a", "models": ["ok", "not ok"]}, "'not ok' can't be the name"),
        ({"user": "a", "models": ["m" * 129]}, "can't be the name"),
        ({"user": "a", "limits": KeyLimits(qps=0)}, "qps"),
        ({"user": "a", "limits": KeyLimits(qps=float("nan"))}, "qps"),
        ({"user": "a", "limits": KeyLimits(qps=float("inf"))}, "qps"),
        ({"user": "a", "limits": KeyLimits(burst=0)}, "burst"),
        ({"user": "a", "limits": KeyLimits(tokens_per_minute=10**30)}, "tokens_per_minute"),
        ({"user": "a", "expires": 5.0}, "future"),
        ({"user": "a", "expires": float("nan")}, "future"),
        ({"user": "a", "expires": 1e12}, "100 years"),
    ],
)
def test_what_no_key_can_have(store: KeyStore, arguments: dict, message: str) -> None:
    with pytest.raises(KeyRefused, match=re.escape(message)):
        store.create(**arguments)
    assert store.records() == []


# --- changes


def test_rotation_lets_both_keys_live_for_the_grace(store: KeyStore) -> None:
    now = time.time()
    limits = KeyLimits(qps=3)
    old, first = store.create(
        "alice", name="n", models=["m"], priority="low", limits=limits, expires=now + 1000
    )
    ended, new, second = store.rotate(old.id, grace=100)
    assert first != second
    assert new.rotated_from == old.id
    assert (new.user, new.name, new.models, new.priority, new.limits) == ("alice", "n", ("m",), "low", limits)
    assert ended.expires == pytest.approx(now + 100, abs=60)
    assert new.expires == pytest.approx(now + 1000, abs=60)
    with pytest.raises(KeyRefused, match=f"rotated before; its successor is {new.id}"):
        store.rotate(old.id, grace=0)
    # A grace never prolongs a key; an expiry of its own is the new key's.
    ended, newest, _ = store.rotate(new.id, grace=10**6, expires=now + 5000)
    assert ended.expires == new.expires
    assert newest.expires == now + 5000


def test_rotating_again_after_the_successor_was_revoked(store: KeyStore) -> None:
    old, _ = store.create("alice")
    _, lost, _ = store.rotate(old.id, grace=100)
    store.revoke([lost.id])
    _, new, _ = store.rotate(old.id, grace=100)
    assert new.rotated_from == old.id


def test_only_an_active_key_can_be_rotated(store: KeyStore) -> None:
    gone, _ = store.create("alice")
    store.revoke([gone.id])
    with pytest.raises(KeyRefused, match="was revoked at 20"):
        store.rotate(gone.id, grace=0)
    old, _ = store.create("alice")
    store.rotate(old.id, grace=0)
    with pytest.raises(KeyRefused, match="expired at 20"):
        store.rotate(old.id, grace=0)
    for grace in (-1, float("inf"), float("nan")):
        with pytest.raises(KeyRefused, match="grace"):
            store.rotate(old.id, grace=grace)
    with pytest.raises(KeyRefused, match="there is no key nosuchkey0"):
        store.rotate("nosuchkey0", grace=0)


def test_revocation_is_all_or_nothing_and_keeps_its_time(store: KeyStore) -> None:
    a, _ = store.create("alice")
    b, _ = store.create("bob")
    with pytest.raises(KeyRefused, match="there is no key"):
        store.revoke([a.id, "nosuchkey0"])
    assert store.get(a.id).revoked is None
    (first,) = store.revoke([a.id])
    assert first.state(time.time()) == "revoked"
    again, other = store.revoke([a.id, b.id])
    assert again.revoked == first.revoked
    assert other.revoked is not None


def test_a_reader_gets_only_what_changed(store: KeyStore, path: Path) -> None:
    a, _ = store.create("alice")
    b, _ = store.create("bob")
    with KeyStore(path) as reader:
        version = reader.version()
        assert reader.version() == version
        last = reader.changes(0)[-1].number
        assert reader.changes(last) == []
        store.revoke([a.id])
        assert reader.version() != version
        (change,) = reader.changes(last)
        assert change.id == a.id
        assert change.record is not None
        assert change.record.revoked is not None
        _, new, _ = store.rotate(b.id, grace=5)
        assert {change.id for change in reader.changes(change.number)} == {b.id, new.id}


# --- files that can't be used


@pytest.mark.parametrize("content", [b"", b"hello" * 500])
def test_another_file_is_no_store(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreUnusable, match=re.escape(str(path))):
        KeyStore(path, create=True, write=True)
    assert path.read_bytes() == content


def test_another_database_and_a_newer_format_are_refused(store: KeyStore, path: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(StoreUnusable, match="no file of keys"):
        KeyStore(foreign)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(StoreUnusable, match="has format 9"):
        KeyStore(path)


def test_no_file_and_no_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable):
        KeyStore(tmp_path / "none.db", write=True)
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(StoreUnusable, match="No such file"):
        KeyStore(tmp_path / "none" / "keys.db", create=True)


def test_a_writer_that_holds_the_file_is_not_waited_for_by_readers(store: KeyStore, path: Path) -> None:
    record, _ = store.create("alice")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with KeyStore(path) as reader:
        assert reader.get(record.id) == record
        with pytest.raises(StoreUnusable, match="locked"):
            reader.create("bob")
    holder.close()


# --- several processes


def _write_much(path: Path, user: str, barrier: Barrier) -> None:
    barrier.wait(120)
    for _ in range(6):
        with KeyStore(path, create=True, write=True) as store:
            record, _ = store.create(user)
            store.rotate(record.id, grace=60)


def test_processes_that_make_and_change_the_same_store_lose_nothing(path: Path) -> None:
    """Each opens it anew for every key; who comes first makes it."""
    barrier = SPAWN.Barrier(4)
    processes = [SPAWN.Process(target=_write_much, args=(path, f"user{n}", barrier)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    with KeyStore(path) as store:
        users = [record.user for record in store.records()]
        numbers = [change.number for change in store.changes(0)]
    assert sorted(users) == sorted(f"user{n}" for n in range(4) for _ in range(12))
    # Three changes a key and its successor: made, made, ended; each has had a number of its own.
    assert len(set(numbers)) == 48
    assert max(numbers) == 72
    assert [file for file in path.parent.iterdir() if file.name.startswith(".keys-")] == []


def test_who_makes_the_store_second_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw that there is no file."""
    with KeyStore(path, create=True, write=True) as first:
        record, _ = first.create("alice")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)
        second = KeyStore(path, create=True, write=True)
    with second:
        assert second.records() == [record]


def _create_until_killed(path: Path) -> None:
    with KeyStore(path, write=True) as store:
        while True:
            record, _ = store.create("victim")
            print(record.id, flush=True)


def test_a_killed_writer_leaves_every_key_that_it_told_of(store: KeyStore, path: Path, capfd) -> None:
    process = SPAWN.Process(target=_create_until_killed, args=(path,))
    process.start()
    deadline = time.monotonic() + 120
    while len(store.changes(0)) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join(60)
    told = capfd.readouterr().out.split()
    known = {record.id for record in store.records()}
    assert len(told) >= 15
    assert {key_id for key_id in told if len(key_id) == 10} <= known
    store.create("after")
