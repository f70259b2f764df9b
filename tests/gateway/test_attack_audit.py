"""The audit file: followed while it is rotated faster than it is read, and with other things in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gateway.usage import reader, sinks
from gateway.usage.audit_file import AuditFile
from gateway.usage.reader import AuditTail
from tests.gateway.test_usage_audit import LARGE, Losses, ids, record, recording, until, written

WRITER = """
import sys
from pathlib import Path
from gateway.usage.audit_file import AuditFile
from gateway.usage.sinks import AuditSink
from tests.gateway.test_usage_audit import record
sink = AuditSink(AuditFile(Path(sys.argv[1]), 2000, 400))
print("ready", flush=True)
sys.stdin.readline()
for number in range(250):
    sink.take([record(number, user=sys.argv[2])])
    sink.flush()
"""


def test_following_three_processes_that_rotate_all_the_time_shows_each_line_once(tmp_path: Path) -> None:
    """The reader is slow: dozens of files come and are moved on while it looks away."""
    path = tmp_path / "a"
    path.touch()
    argv = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen([*argv, name], **pipes) for name in "xyz"]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    end = AuditTail(path, lambda line: True)
    coming = end.follow()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    seen = []
    while len(seen) < 750:
        seen.append(next(coming)[1])
        if len(seen) % 50 == 0:
            time.sleep(0.1)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    for name in "xyz":
        assert [line.request_id for line in seen if line.user == name] == [f"r-{n}" for n in range(250)]
    assert len(list(tmp_path.iterdir())) > 50
    end.close()


FULL = """
import resource, sys
from pathlib import Path
from gateway.usage.audit_file import AuditFile
from gateway.usage.sinks import AuditSink, Unwritten
from tests.gateway.test_usage_audit import record
sink = AuditSink(AuditFile(Path(sys.argv[1]), 10**6, 3))
sink.take([record(0)])
sink.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
sink.take([record(number) for number in range(1, 41)])
for _ in range(2000):
    try:
        sink.flush()
        raise SystemExit("there was room")
    except Unwritten:
        pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink.flush()
"""


def test_who_follows_sees_nothing_of_what_a_full_disk_takes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty lines of forty fit each time, and are cut off again."""
    monkeypatch.setattr(reader, "POLL_SECONDS", 0.0)
    path = tmp_path / "a"
    path.touch()
    end = AuditTail(path, lambda line: True)
    coming = end.follow()
    writer = subprocess.Popen([sys.executable, "-c", FULL, str(path)])
    assert ids(next(coming) for _ in range(41)) == [f"r-{number}" for number in range(41)]
    assert writer.wait() == 0
    assert list(end._new()) == []
    end.close()


def test_the_last_lines_of_a_file_that_is_moved_on_meanwhile_come_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = AuditFile(path, 1, 9)  # a line a file
    sink = sinks.AuditSink(file)
    for number in range(4):
        sink.take([record(number)])
        sink.flush()
    end = AuditTail(path, lambda line: True)
    sink.take([record(4)])
    sink.flush()
    assert ids(end.last(10)) == ["r-0", "r-1", "r-2", "r-3"]
    assert ids([next(end.follow())]) == ["r-4"]
    end.close()


def test_a_file_that_cannot_be_moved_away_grows_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Better than what memory has room for, and then nothing; it is said once."""
    path, losses = tmp_path / "a", Losses()
    (tmp_path / "a.1").mkdir()
    running = recording(path, losses, max_size=600, keep=1)
    for number in range(6):
        running.add(record(number))
        until(lambda number=number: path.exists() and len(written(path)) == number + 1)
    running.close()
    assert (losses.lost, losses.failures) == (0, 0)
    said = [entry.getMessage() for entry in caplog.records]
    assert len([text for text in said if "can't be moved away and grows on" in text]) == 1


def test_a_directory_in_its_place_costs_nothing_once_it_goes(tmp_path: Path) -> None:
    path, losses = tmp_path / "a", Losses()
    running = recording(path, losses)
    running.add(record(1))
    until(lambda: path.exists() and written(path))
    os.replace(path, tmp_path / "before")
    path.mkdir()
    running.add(record(2))
    until(lambda: losses.failures)
    path.rmdir()
    running.add(record(3))
    running.close()
    lines = written(tmp_path / "before") + written(path)
    assert [line["request_id"] for line in lines] == ["r-1", "r-2", "r-3"]
    assert losses.lost == 0


def test_what_is_followed_may_be_gone_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "a"
    sink = sinks.AuditSink(AuditFile(path, LARGE, 3))

    def add(number: int) -> None:
        sink.take([record(number)])
        sink.flush()

    add(0)
    end = AuditTail(path, lambda line: True)
    coming = end.follow()
    add(1)
    path.unlink()
    assert ids([next(coming)]) == ["r-1"]
    path.mkdir()
    coming_back = threading.Timer(0.5, lambda: (path.rmdir(), add(2)))
    coming_back.start()
    assert ids([next(coming)]) == ["r-2"]
    coming_back.join()
    end.close()
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for other in ("other", "pipe"):
        with pytest.raises(OSError, match="no file that can be read from its end"):
            AuditTail(tmp_path / other, lambda line: True)
