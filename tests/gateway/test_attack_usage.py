"""A file of usage that is spoilt while three gateway processes add to it: no request fails, each process says
so once, and what was not written yet is written when the file can be had again."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.usage.store import USAGE_FILE
from tests.gateway.rig import until
from tests.gateway.test_limits_processes import Gateways, ask, gateways

SAID = "move it away"


def written(path: Path) -> int:
    """Requests in the file; -1 when it can't be asked."""
    try:
        with sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT coalesce(sum(requests), 0) FROM usage").fetchone()[0])
    except sqlite3.Error:
        return -1


def into_file(path: Path) -> None:
    """What the log holds; else nobody reads the file itself."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def garbage_in_place(path: Path) -> None:
    into_file(path)
    with path.open("r+b") as file:
        file.write(b"no database" * 1000)


def cut_in_place(path: Path) -> None:
    into_file(path)
    os.truncate(path, 100)


def garbage_moved_there(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"no database" * 1000)
    os.replace(other, path)


def nothing_moved_there(path: Path) -> None:
    other = path.with_name("other")
    other.touch()
    os.replace(other, path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def somebody_elses(path: Path) -> None:
    path.unlink()
    for left in path.parent.glob(f"{USAGE_FILE}-*"):
        left.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")


async def use(fleet: Gateways, count: int) -> None:
    answers = await asyncio.gather(*(ask(fleet.clients[i % 3]) for i in range(count)))
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize(
    "damage",
    [
        garbage_in_place,
        cut_in_place,
        garbage_moved_there,
        nothing_moved_there,
        directory,
        somebody_elses,
    ],
    ids=lambda damage: damage.__name__,
)
async def test_damage_while_it_is_used(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "fleet"
    folder.mkdir()
    path = folder / USAGE_FILE
    async with gateways(folder, 3) as fleet:
        before = 30 + len(fleet.rig.workers[0].requests)
        await use(fleet, 30)
        await until(lambda: written(path) == before)
        damage(path)
        # A cached connection may take some more until it sees what happened.
        count = 0
        while fleet.log().count(SAID) < 3:
            await use(fleet, 3)
            count += 3
            await asyncio.sleep(0.3)
            assert count < 60
        await use(fleet, 30)
        await asyncio.sleep(0.6)
        assert fleet.log().count(SAID) == 3
        if path.is_dir():
            path.rmdir()
        else:
            os.replace(path, folder / "moved")
        await until(lambda: written(path) >= 30)
        await until(lambda: fleet.log().count("usage: written again; 0 requests were lost") == 3)
        await use(fleet, 30)
        await until(lambda: written(path) >= 60)
    assert "Traceback" not in fleet.log()
