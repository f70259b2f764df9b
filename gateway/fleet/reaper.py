"""Finds every process of a fleet, and ends what a crashed supervisor left behind.

Each process is started with a mark in its environment, which its children inherit whatever session or
group they move to. A recycled process id never carries the mark of our fleet, so it is never hit.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
import psutil

from gateway.fleet.statedir import write_private

MARK = "PAGEFLEET_INSTANCE"  # <fleet instance>/<slot>.<generation>


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was started. `started` is in clock ticks since boot, as in /proc/PID/stat."""

    pid: int
    started: int
    mark: str


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """All running processes of one supervisor; `boot_id` tells whether the machine has restarted since."""

    instance: str
    boot_id: str
    supervisor: int
    processes: tuple[Record, ...] = ()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When a process started, None when there is none."""
    # Field 22; the name before it may hold spaces and brackets.
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def read_records(path: Path) -> Records | None:
    """What a predecessor wrote; None when there is nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Records)
    except (OSError, ValueError, RecursionError):
        return None


def write_records(path: Path, records: Records) -> None:
    write_private(path, msgspec.json.encode(records))


def marked(mark: str) -> list[psutil.Process]:
    """The living processes with this mark, or one below it (`instance` covers `instance/slot.generation`)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            value = process.environ().get(MARK, "")
            if (value == mark or value.startswith(mark + "/")) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def kill_marked(mark: str) -> int:
    """SIGKILL to all that carry the mark, until none is left to see; returns how many."""
    killed = 0
    for _ in range(3):  # a process may fork while we look
        processes = marked(mark)
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil compares start times, so a recycled id is safe
                killed += 1
    return killed


def reap(path: Path, patience: float = 5.0) -> int:
    """Kills what the supervisor that wrote `path` left, waits until it is gone, says how many there were."""
    records = read_records(path)
    if records is None or records.boot_id != boot_id():
        _forget(path)
        return 0
    victims = {process.pid: process for process in marked(records.instance)}
    for record in records.processes:
        # A process that has overwritten its environment is still known by id and start time.
        if record.pid not in victims and start_ticks(record.pid) == record.started:
            with contextlib.suppress(psutil.Error):
                victims[record.pid] = psutil.Process(record.pid)
    for process in victims.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + patience
    while marked(records.instance) and time.monotonic() < deadline:
        kill_marked(records.instance)
        time.sleep(0.02)
    _forget(path)
    return len(victims)


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):  # a directory in its place: the next supervisor says so
        path.unlink()
