"""SQLite files that are deleted or moved away while processes have them open: logs are found by name."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.identity.keyring import KeyRing
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.usage.store import USAGE_FILE, UsageStore
from tests.gateway.test_identity_keyring import find
from tests.gateway.test_usage_audit import until

ADDS = """
import sys
from pathlib import Path
from gateway.usage.store import UsageStore, UsageUnusable
path, name = Path(sys.argv[1]), sys.argv[2]
store, added = UsageStore(path), 0
while not path.with_name("stop").exists():
    rows = {(3600 * (added + n), f"user-{name}-{n}", "k", "m"): [1] * 6 for n in range(20)}
    try:
        store.add(rows)
        added += len(rows)
    except UsageUnusable as error:  # the next moment will do
        print(error, file=sys.stderr)
store.close()
print(added)
"""


def sum_of(path: Path) -> int:
    """Requests in a whole file."""
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return int(db.execute("SELECT coalesce(sum(requests), 0) FROM usage").fetchone()[0])


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_usage_that_is_moved_away_under_three_processes_is_whole_and_all_there(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    argv = [sys.executable, "-c", ADDS, str(path)]
    children = [subprocess.Popen([*argv, name], stdout=subprocess.PIPE) for name in "abc"]
    moved = [tmp_path / f"moved{number}.db" for number in range(5)]
    for place in moved:
        until(lambda: path.exists() and size(path.with_name(USAGE_FILE + "-wal")) > 200_000)
        os.replace(path, place)
    (tmp_path / "stop").touch()
    added = sum(int(child.communicate(timeout=60)[0]) for child in children)
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sum(sum_of(file) for file in [*moved, path] if file.exists()) == added


@pytest.mark.parametrize("open_still", [True, False], ids=["open", "killed"])
def test_nothing_of_a_deleted_file_of_usage_comes_back(tmp_path: Path, open_still: bool) -> None:
    """Also where its log was left by processes that were killed."""
    path, log = tmp_path / USAGE_FILE, tmp_path / (USAGE_FILE + "-wal")
    store = UsageStore(path)
    store.add({(0, f"user{number}", "", "m"): [1] * 6 for number in range(2000)})
    assert size(log) > 0
    if not open_still:
        shutil.copy(log, tmp_path / "left")
        store.close()
        shutil.move(tmp_path / "left", log)
    path.unlink()
    other = UsageStore(path)
    other.add({(0, "bob", "", "m"): [1] * 6})
    assert [total.group for total in other.totals(["user"])] == [("bob",)]
    store.add({(0, "eve", "", "m"): [1] * 6})
    store.close()
    other.close()
    assert sum_of(path) == 2


def test_no_key_of_a_deleted_file_counts_again(tmp_path: Path) -> None:
    """Gateways have it open when it is deleted, and another is made at once."""
    path = tmp_path / KEYS_FILE
    with KeyStore(path, create=True, write=True) as store:
        old, _ = store.create("alice")
    rings = [KeyRing(path) for _ in range(3)]
    with KeyStore(path, write=True) as store:
        later, _ = store.create("alice")
        store.create("carol")
        assert all(find(ring, later.id) for ring in rings)
        path.unlink()
        assert find(rings[0], old.id) is None
        with KeyStore(path, create=True, write=True) as another:
            new, _ = another.create("bob")
    for ring in rings:
        assert find(ring, new.id) is not None
        assert ring.find(old.id.encode()) is None
        assert ring.find(later.id.encode()) is None
        ring.close()
    with KeyStore(path) as store:
        assert [record.user for record in store.records()] == ["bob"]


def test_a_copy_of_the_file_of_keys_alone_has_every_revocation(tmp_path: Path) -> None:
    """Though gateways have it open, and so nobody else puts its log into it."""
    path, copy = tmp_path / KEYS_FILE, tmp_path / "copy.db"
    with KeyStore(path, create=True, write=True) as store:
        kept, _ = store.create("alice")
    ring = KeyRing(path)
    with KeyStore(path, write=True) as store:
        store.revoke([kept.id])
    shutil.copy(path, copy)
    with KeyStore(copy) as store:
        assert store.get(kept.id).revoked is not None
    ring.close()
