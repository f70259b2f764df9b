"""Sums of usage: several gateways on one file, what can't be written, and the commands that read them."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from contracts.usage import Usage
from gateway.cli import main
from gateway.usage import sinks
from gateway.usage.audit_file import AuditFile
from gateway.usage.sinks import OTHERS, UsageSink
from gateway.usage.store import HOUR, USAGE_FILE, Total, UsageStore, UsageUnusable
from tests.gateway.test_usage_audit import Losses, record, started, until

NOON = 1_800_014_400.0  # 2027-01-15 12:00 UTC


def totals(path: Path, *by: Any, **filters: Any) -> list[Total]:
    store = UsageStore(path)
    try:
        return store.totals(by, **filters)
    finally:
        store.close()


def fill(path: Path, *records: Any) -> None:
    running = started(None, path)
    for each in records:
        running.add(each)
    running.close()


def test_sums_by_user_key_model_and_time(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    fill(
        path,
        record(at=NOON),
        record(at=NOON + HOUR - 1, status=499, usage=Usage(10, 2, 0, "abort")),
        record(at=NOON + HOUR, status=429, usage=None),
        record(at=NOON + 86400, user="bob", key_id=None, model="other"),
        record(at=NOON, user=None, status=401),
        record(at=NOON, model="", status=404),
    )
    assert totals(path, "user", "model") == [
        (("alice", "m"), 3, 1, 1, 15, 9, 3),
        (("bob", "other"), 1, 0, 0, 5, 7, 3),
    ]
    assert [total.group for total in totals(path, "hour")] == [
        ("2027-01-15 12:00",),
        ("2027-01-15 13:00",),
        ("2027-01-16 12:00",),
    ]
    assert [total[:2] for total in totals(path, "day", "key")] == [
        (("2027-01-15", "k1"), 3),
        (("2027-01-16", ""), 1),
    ]
    assert totals(path) == [((), 4, 1, 1, 20, 16, 6)]
    assert totals(path, user="alice", since=NOON + HOUR + 5)[0].requests == 1
    assert totals(path, until=NOON + HOUR)[0].requests == 2
    assert totals(path, key="k1", model="m", until=NOON + 1)[0].requests == 2
    assert totals(path, model="none")[0].requests == 0
    assert totals(path, "model", model="none") == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


GATEWAY = """
import os, signal, sys
from pathlib import Path
from gateway.usage.store import UsageStore
from tests.gateway.test_usage_audit import record, started, until
path, name = Path(sys.argv[1]), sys.argv[2]
running = started(None, path)
for number in range(5000):
    running.add(record(at=1_800_014_400, user=f"user{number % 3}", model=name))
    if name == "killed" and number == 2500:
        until(lambda: path.exists() and UsageStore(path).totals((), model=name)[0].requests)
        os.kill(os.getpid(), signal.SIGKILL)
running.close()
"""


def test_several_gateways_add_up_and_one_that_is_killed_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    argv = [sys.executable, "-c", GATEWAY, str(path)]
    processes = [subprocess.Popen([*argv, name]) for name in ("a", "b", "killed")]
    assert [process.wait() for process in processes] == [0, 0, -9]
    (total,) = totals(path)
    assert 10_000 < total.requests <= 12_501
    assert total.prompt_tokens == 5 * total.requests
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_busy_file_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, losses = tmp_path / USAGE_FILE, Losses()
    fill(path, record())
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    running = started(None, path, losses)
    running.add(record())
    until(lambda: losses.failures >= 2)
    blocker.execute("COMMIT")
    blocker.close()
    running.close()
    assert totals(path)[0].requests == 2
    assert losses.lost == 0
    assert len([entry for entry in caplog.records if "locked" in entry.getMessage()]) == 1


def test_a_file_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """And its directory with it."""
    path = tmp_path / "state" / USAGE_FILE
    running = started(None, path)
    running.add(record())
    until(lambda: path.exists() and totals(path, "user"))
    shutil.rmtree(path.parent)
    running.add(record(user="bob"))
    running.close()
    assert [total.group for total in totals(path, "user")] == [("bob",)]


def test_something_else_is_never_written_to(tmp_path: Path) -> None:
    path, losses = tmp_path / USAGE_FILE, Losses()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (x)")
    before = path.read_bytes()
    running = started(AuditFile(tmp_path / "audit", 10**6, 3), path, losses)
    running.add(record())
    running.close()
    assert path.read_bytes() == before
    assert losses.failures
    assert losses.lost == 1
    assert len((tmp_path / "audit").read_bytes().splitlines()) == 1  # one sink's trouble isn't the other's
    with pytest.raises(UsageUnusable, match="no file of usage"):
        totals(path)
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA application_id = {0x70667573}")
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(UsageUnusable, match="format 9; this version of pagefleet knows 2"):
        totals(path)


def test_names_without_end_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auth: none` a client can be a new user with every request."""
    monkeypatch.setattr(sinks, "MAX_ROWS", 10)
    path = tmp_path / USAGE_FILE
    fill(path, *[record(at=NOON, user=f"u{number}") for number in range(100)])
    by_user = {total.group[0]: total.requests for total in totals(path, "user")}
    assert len(by_user) == 11
    assert by_user[OTHERS] == 90


def test_a_clock_that_was_ahead_puts_nobody_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hour after it was set right has room for as many as ever."""
    monkeypatch.setattr(sinks, "MAX_ROWS", 10)
    path = tmp_path / USAGE_FILE
    hours = [NOON, NOON + 365 * 86400, *(NOON + n * HOUR for n in range(4))]
    sink = UsageSink(UsageStore(path))
    for hour in hours:
        sink.take([record(at=hour, user=f"u{number}") for number in range(8)])
        sink.flush()
    sink.close()
    assert {total.group[0] for total in totals(path, "user")} == {f"u{number}" for number in range(8)}
    assert [total.requests for total in totals(path, "hour")] == [16, 8, 8, 8, 8]


VERSION_1 = """
CREATE TABLE usage (hour INTEGER NOT NULL, user TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, failed INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    PRIMARY KEY (hour, user, key, model)) WITHOUT ROWID;
INSERT INTO usage VALUES (1800014400, 'alice', 'k1', 'm', 4, 1, 20, 28, 12);
PRAGMA application_id = 0x70667573;
PRAGMA user_version = 1;
"""


def test_a_file_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """Also under a gateway of that version that has it open."""
    path = tmp_path / USAGE_FILE
    with sqlite3.connect(path) as older:
        older.executescript(VERSION_1)
        fill(path, record(at=NOON, status=429, usage=None))
        older.execute(
            "INSERT INTO usage (hour, user, key, model, requests, failed, prompt_tokens, completion_tokens, "
            "cached_tokens) VALUES (1800014400, 'bob', '', 'm', 1, 0, 5, 7, 3)"
        )
    assert totals(path, "user") == [(("alice",), 5, 1, 1, 20, 28, 12), (("bob",), 1, 0, 0, 5, 7, 3)]


def test_old_hours_are_folded_into_days_and_no_sum_changes(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    hours = range(-40, 40)
    fill(path, *[record(at=NOON + n * HOUR, user=f"u{n % 3}", status=429 if n % 7 else 500) for n in hours])
    before = [totals(path), totals(path, "day", "user"), totals(path, "user", "key", "model")]
    stores = [UsageStore(path), UsageStore(path)]
    steps = 0
    while sum(store.fold(NOON + 5 * HOUR) for store in stores):  # several gateways do it at once
        steps += 1
        assert [totals(path), totals(path, "day", "user"), totals(path, "user", "key", "model")] == before
    for store in stores:
        store.close()
    rows = [total.group[0] for total in totals(path, "hour")]
    assert rows[:2] == ["2027-01-13 00:00", "2027-01-14 00:00"]
    assert rows[2:] == [f"2027-01-15 {hour:02}:00" for hour in range(24)] + [
        f"2027-01-16 {hour:02}:00" for hour in range(24)
    ] + [f"2027-01-17 {hour:02}:00" for hour in range(4)]
    assert steps == 14  # each two of the 27 hours


def test_a_gateway_folds_what_is_old(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    now = time.time() // 86400 * 86400
    fill(path, *[record(at=now - 86400 * 3 + n * HOUR) for n in range(24)])
    sink = UsageSink(UsageStore(path), hours_kept=2 * 86400)
    for _ in range(30):
        sink.take([record(at=now + 5)])
        sink.flush()
    sink.close()
    assert [total.requests for total in totals(path, "hour")] == [24, 30]


def test_what_cannot_be_written_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_ROWS", 10)
    (tmp_path / "file").write_text("")
    sink = UsageSink(UsageStore(tmp_path / "file" / USAGE_FILE))
    for hour in range(10):
        sink.take([record(at=NOON + hour * HOUR, user=f"u{number}") for number in range(10)])
        with pytest.raises(sinks.Unwritten):
            sink.flush()
    assert sink.lost == 79
    assert sink.close() == 21


# --- commands


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments, prog_name="pagefleet")
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a fleet with an audit file."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / ".pagefleet"
    (directory / "run").mkdir(parents=True)
    configuration = {
        "gateway": {"audit": {"file": str(tmp_path / "audit.jsonl")}, "port": 8000},
        "models": [],
    }
    (directory / "run" / "fleet.json").write_text(json.dumps(configuration))
    return directory


def test_usage_command(state: Path) -> None:
    assert "nothing has been used yet in" in invoke("usage", code=1).stderr
    now = time.time()
    fill(
        state / USAGE_FILE,
        record(at=now, user="alice", usage=Usage(1000, 2000, 0, "stop")),
        record(at=now - 10 * 86400, user="[red]bob\x1b\x9b", status=500),
    )
    head, *rest = invoke("usage").stdout.splitlines()
    assert (
        " ".join(head.split())
        == "USER MODEL REQUESTS FAILED REFUSED PROMPT TOKENS COMPLETION TOKENS CACHED TOKENS"
    )
    lines = [line.split() for line in rest]
    assert lines[0] == ["[red]bob\\x1b\\x9b", "m", "1", "1", "0", "5", "7", "3"]
    assert lines[1] == ["alice", "m", "1", "0", "0", "1,000", "2,000", "0"]
    assert lines[2] == ["all", "2", "1", "0", "1,005", "2,007", "3"]
    answer = json.loads(invoke("usage", "--json", "--by", "user", "--since", "7d").stdout)
    assert answer == [
        {
            "user": "alice",
            "requests": 1,
            "failed": 0,
            "refused": 0,
            "prompt_tokens": 1000,
            "completion_tokens": 2000,
            "cached_tokens": 0,
        }
    ]
    assert "\x9b" not in invoke("usage", "--json").stdout
    assert json.loads(invoke("usage", "--json", "--until", "7d", "--user", "alice").stdout) == []
    assert json.loads(invoke("usage", "--json", "--since", "2999-01-01").stdout) == []
    assert "no time" in invoke("usage", "--since", "soon", code=2).stderr
    assert invoke("usage", "--user", "nobody").stdout.split()[-7:] == ["all", *"000000"]


def test_audit_command(state: Path) -> None:
    path = state.parent / "audit.jsonl"
    assert "can't be read" in invoke("audit", "tail", code=1).stderr
    running = started(AuditFile(path, 10**6, 3))
    refused = {"usage": None, "target": "", "first_token": None}
    running.add(record(1, status=429, code="rate_limit_exceeded", **refused))
    running.add(record(2, user="a\nb\x1b[2J", model="other"))
    running.add(record(3))
    running.close()
    lines = invoke("audit", "tail").stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].split()[2:7] == ["429", "rate_limit_exceeded", "alice", "k1", "m"]
    assert "a\\nb\\x1b[2J" in lines[1]
    assert "5+7 tokens, 0.250 s, first after 0.125 s" in lines[2]
    raw = path.read_text().splitlines()
    assert invoke("audit", "tail", "-n", "1", "--json").stdout.splitlines() == raw[-1:]
    for option, value, expected in [
        ("--status", "429", raw[:1]),
        ("--status", "4xx", raw[:1]),
        ("--user", "alice", [raw[0], raw[2]]),
        ("--model", "other", raw[1:2]),
        ("--key", "k2", []),
    ]:
        assert invoke("audit", "tail", "--json", option, value).stdout.splitlines() == expected
    assert "no status" in invoke("audit", "tail", "--status", "abc", code=2).stderr


def test_audit_command_of_a_fleet_without_audit(state: Path) -> None:
    (state / "run" / "fleet.json").write_text('{"gateway": {"audit": {"file": null}}}')
    assert "gateway.audit.file names one" in invoke("audit", "tail", code=2).stderr
    (state / "run" / "fleet.json").unlink()
    assert "no fleet was up in" in invoke("audit", "tail", code=2).stderr
