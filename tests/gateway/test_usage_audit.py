"""The audit file: whole lines, whoever else writes, rotates or takes its room away."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.usage import Usage
from gateway.usage import recorder, sinks
from gateway.usage.audit_file import AuditFile
from gateway.usage.reader import AuditTail
from gateway.usage.record import Record
from gateway.usage.recorder import Recorder
from gateway.usage.store import UsageStore

LARGE = 64 * 1024**2


def record(number: int = 0, **fields: Any) -> Record:
    known = {
        "at": 1.8e9 + number,
        "seconds": 0.25,
        "first_token": 0.125,
        "request_id": b"r-%d" % number,
        "path": b"/v1/chat/completions",
        "status": 200,
        "code": None,
        "user": "alice",
        "key_id": "k1",
        "model": "m",
        "target": "m-0.1",
        "usage": Usage(5, 7, 3, "stop"),
    }
    return Record(**{**known, **fields})


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Losses:
    """What a recorder said of losses and failures."""

    def __init__(self) -> None:
        self.lost = 0
        self.failures = 0

    def on_lost(self, name: str, count: int) -> None:
        self.lost += count

    def on_failure(self, name: str) -> None:
        self.failures += 1


def started(audit: AuditFile | None, usage: Path | None = None, losses: Losses | None = None) -> Recorder:
    """A running recorder of either or both."""
    losses = losses or Losses()
    places: list[sinks.Sink] = [] if audit is None else [sinks.AuditSink(audit)]
    places += [] if usage is None else [sinks.UsageSink(UsageStore(usage))]
    recorder = Recorder(places, losses.on_lost, losses.on_failure)
    recorder.start()
    return recorder


def recording(path: Path, losses: Losses | None = None, max_size: int = LARGE, keep: int = 3) -> Recorder:
    return started(AuditFile(path, max_size, keep), None, losses)


# --- lines


def test_a_line_says_all_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / "new" / "audit.jsonl"
    running = recording(path)
    running.add(record(1))
    refused = {"user": None, "key_id": None, "model": "", "target": "", "usage": None, "first_token": None}
    running.add(record(2, status=401, code="invalid_api_key", **refused))
    eve = 'eve"\n{"status":200}\x1b[2J\x7f\x9b2J\x85\u2028\u202e\u2066\ufeff'
    running.add(record(3, user=eve, body=b'{"prompt": "\xff"}'))
    running.close()
    full, short, odd = written(path)
    assert full == {
        "time": "2027-01-15T08:00:01.000Z",
        "request_id": "r-1",
        "path": "/v1/chat/completions",
        "status": 200,
        "seconds": 0.25,
        "first_token_seconds": 0.125,
        "user": "alice",
        "key_id": "k1",
        "model": "m",
        "target": "m-0.1",
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "cached_tokens": 3,
        "finish_reason": "stop",
    }
    assert short == {
        "time": "2027-01-15T08:00:02.000Z",
        "request_id": "r-2",
        "path": "/v1/chat/completions",
        "status": 401,
        "seconds": 0.25,
        "code": "invalid_api_key",
    }
    assert odd["user"] == eve
    assert odd["body"] == '{"prompt": "\ufffd"}'
    assert path.read_text().replace("\n", "").isprintable()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_everything_is_there_after_an_orderly_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    running = recording(path)
    for number in range(10_000):
        running.add(record(number))
    running.close()
    assert [line["request_id"] for line in written(path)] == [f"r-{n}" for n in range(10_000)]


def test_adding_costs_the_event_loop_almost_nothing(tmp_path: Path) -> None:
    """No lock, no system call: a record is queued without ever waiting for the thread, even while the thread
    hangs in a write."""
    held = threading.Event()

    class Hanging(AuditFile):
        def append(self, lines: bytes) -> None:
            held.wait(30)
            super().append(lines)

    running = started(Hanging(tmp_path / "a", LARGE, 3))
    running.add(record())
    time.sleep(2 * recorder.FLUSH_SECONDS)
    began = time.monotonic()
    for number in range(20_000):
        running.add(record(number))
    assert time.monotonic() - began < 15
    held.set()
    running.close()
    assert len(written(tmp_path / "a")) == 20_001


# --- rotation


def test_rotation_by_size_keeps_so_many(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = AuditFile(path, max_size=100, keep=2)
    for letter in b"abcdefgh":
        file.append(b"%c" % letter * 39 + b"\n")
    file.close()
    assert {p.name: p.read_bytes()[:1] + p.read_bytes()[40:41] for p in tmp_path.iterdir()} == {
        "a": b"gh",
        "a.1": b"ef",
        "a.2": b"cd",
    }


def test_a_line_longer_than_the_limit_is_written_all_the_same(tmp_path: Path) -> None:
    file = AuditFile(tmp_path / "a", max_size=10, keep=1)
    for letter in (b"x", b"y"):
        file.append(letter * 50 + b"\n")
    assert (tmp_path / "a").read_bytes() == b"y" * 50 + b"\n"
    assert (tmp_path / "a.1").read_bytes() == b"x" * 50 + b"\n"


WRITER = """
import sys
from pathlib import Path
from gateway.usage.audit_file import AuditFile
file = AuditFile(Path(sys.argv[1]), 20_000, 1000)
file.append(b"%s first\\n" % sys.argv[2].encode())
sys.stdin.readline()
for number in range(400):
    file.append(b"".join(b"%s %d %d\\n" % (sys.argv[2].encode(), number, i) for i in range(5)))
"""


def test_several_processes_write_and_rotate_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    argv = [sys.executable, "-c", WRITER, str(path)]
    processes = [subprocess.Popen([*argv, name], stdin=subprocess.PIPE) for name in "xyz"]
    until(lambda: path.exists() and path.read_bytes().count(b"first\n") == 3)
    moved = 0
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    while any(process.poll() is None for process in processes):  # and logrotate, with `create` or without
        with contextlib.suppress(FileNotFoundError):
            if moved < 20:
                os.replace(path, tmp_path / f"moved{moved}")
                moved += 1
        time.sleep(0.05)
    assert [process.wait() for process in processes] == [0, 0, 0]
    lines = b"".join(p.read_bytes() for p in tmp_path.iterdir()).splitlines()
    assert sorted(lines) == sorted(
        [b"%c first" % c for c in b"xyz"]
        + [b"%c %d %d" % (c, n, i) for c in b"xyz" for n in range(400) for i in range(5)]
    )
    assert moved
    assert max(p.stat().st_size for p in tmp_path.iterdir()) <= 20_000


def test_logrotate_by_copying_and_cutting(tmp_path: Path) -> None:
    file = AuditFile(tmp_path / "a", LARGE, 3)
    file.append(b"one\n")
    os.truncate(tmp_path / "a", 0)
    file.append(b"two\n")
    assert (tmp_path / "a").read_bytes() == b"two\n"


def test_a_process_stopped_with_the_lock_in_its_hand_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
            "print('held', flush=True); time.sleep(60)",
            str(path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        AuditFile(path, 10, 3).append(b"a line\n")
        assert path.read_bytes() == b"a line\n"
    finally:
        holder.kill()
        holder.communicate()


# --- when it can't be written


def test_a_full_disk_is_told_of_once_and_nothing_is_lost_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, losses = tmp_path / "a", Losses()
    path.symlink_to("/dev/full")
    running = recording(path, losses)
    running.add(record(1))
    until(lambda: losses.failures >= 2)
    running.add(record(2))
    path.unlink()
    until(path.exists)
    running.close()
    assert [line["request_id"] for line in written(path)] == ["r-1", "r-2"]
    assert losses.lost == 0
    said = [entry.getMessage() for entry in caplog.records]
    assert len([text for text in said if "No space left on device" in text]) == 1
    assert "audit: written again; 0 requests were lost" in said


def test_part_of_a_line_that_found_no_room_is_taken_back(tmp_path: Path) -> None:
    """The kernel writes what fits below the limit, as on a disk that is almost full."""
    script = """
import resource, sys
from pathlib import Path
from gateway.usage.audit_file import AuditFile
resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))
file = AuditFile(Path(sys.argv[1]), 10**6, 3)
file.append(b"a" * 99 + b"\\n")
try:
    file.append(b"b" * 99 + b"\\n")
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append(b"c" * 99 + b"\\n")
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    path = tmp_path / "a"
    argv = [sys.executable, "-c", script, str(path)]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert result.stdout == "File too large\n"
    assert path.read_bytes() == b"a" * 99 + b"\n" + b"c" * 99 + b"\n"


def test_a_vanished_directory_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a"
    file = AuditFile(path, LARGE, 3)
    file.append(b"one\n")
    path.unlink()
    path.parent.rmdir()
    file.append(b"two\n")
    assert path.read_bytes() == b"two\n"


def test_a_directory_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no room in memory is counted; requests never notice."""
    monkeypatch.setattr(sinks, "MAX_UNWRITTEN", 3000)
    losses = Losses()
    (tmp_path / "logs").write_text("no directory")
    running = recording(tmp_path / "logs" / "a", losses)
    for number in range(3):
        running.add(record(number))
        until(lambda: losses.failures)
        losses.failures = 0
    for number in range(100):
        running.add(record(number))
    until(lambda: losses.lost >= 64)  # a few of the last may find room still
    running.close()
    assert losses.lost == 103


def test_a_queue_that_is_full_loses_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED", 10)
    losses = Losses()
    running = Recorder([sinks.AuditSink(AuditFile(tmp_path / "a", LARGE, 3))], losses.on_lost)
    for number in range(25):
        running.add(record(number))
    running.start()
    running.close()
    assert len(written(tmp_path / "a")) == 10
    assert losses.lost == 15


def test_a_bug_in_one_record_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    running = recording(tmp_path / "a")
    running.add(record(1, request_id=None))
    until(lambda: caplog.records)
    running.add(record(2))
    running.close()
    assert [line["request_id"] for line in written(tmp_path / "a")] == ["r-2"]
    assert caplog.records[0].levelno == logging.ERROR


# --- reading


def ids(entries: Any) -> list[str]:
    return [entry.request_id for _, entry in entries]


def test_the_last_lines_over_rotated_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    running = recording(path, max_size=3000)
    for number in range(40):
        running.add(record(number, user="bob" if number % 10 == 0 else "alice"))
        if number % 8 == 7:
            until(lambda: not running._queue)
            time.sleep(0.02)
    running.close()
    assert (tmp_path / "a.2").exists()
    end = AuditTail(path, lambda line: True)
    assert ids(end.last(30)) == [f"r-{n}" for n in range(10, 40)][-len(end.last(30)) :]
    assert len(end.last(30)) > 20
    assert ids(end.last(0)) == []
    end.close()
    bobs = AuditTail(path, lambda line: line.user == "bob")
    assert ids(bobs.last(2)) == ["r-20", "r-30"]
    bobs.close()


def test_following_over_rotations_and_cuts(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = AuditFile(path, LARGE, 3)

    def add(number: int) -> None:
        sink = sinks.AuditSink(file)
        sink.take([record(number)])
        sink.flush()

    add(0)
    end = AuditTail(path, lambda line: True)
    coming = end.follow()
    add(1)
    assert ids([next(coming)]) == ["r-1"]
    add(2)
    os.replace(path, tmp_path / "a.1")
    add(3)
    assert ids([next(coming), next(coming)]) == ["r-2", "r-3"]
    add(4)
    assert ids([next(coming)]) == ["r-4"]
    path.write_bytes(b"")
    add(5)
    assert ids([next(coming)]) == ["r-5"]
    with path.open("ab") as other:
        other.write(b"not ours\n\xff\n")
    add(6)
    assert ids([next(coming)]) == ["r-6"]
    end.close()
