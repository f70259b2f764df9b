"""Numbers in shared memory: what a killed process leaves, what others see, and sums over all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway import board as boards
from gateway.board import Board, Peer, Reading, make_board
from gateway.families import Counter, Families, Gauge, Histogram

WRITER = """
import sys, time
from pathlib import Path
from gateway.board import Board
board = Board(Path(sys.argv[1]), 7)
board.connections = 5
numbers = board.numbers(("counted", "é"), 2)
numbers[0] += 1
numbers[1] += 0.5
board.beat()
print(flush=True)
time.sleep(100)
"""


def writer(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "\n"
    return child


def test_a_killed_process_leaves_its_numbers_to_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "b"
    peer = Peer(path)
    assert peer.read() is None
    for life in (1, 2, 3):
        child = writer(path)
        reading = peer.read()
        assert reading is not None
        assert (reading.pid, reading.generation, reading.alive, reading.leaving) == (
            child.pid,
            7,
            True,
            False,
        )
        assert (reading.connections, peer.connections) == (5, 5)
        assert list(reading.numbers[("counted", "é")]) == [life, life / 2]
        child.send_signal(signal.SIGKILL)
        child.wait()
        reading = peer.read()
        assert reading is not None
        assert not reading.alive
        assert list(reading.numbers[("counted", "é")]) == [life, life / 2]


def test_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, peer = Board(tmp_path / "b", 2), Peer(tmp_path / "b")

    def seen() -> tuple[bool, bool, int | None]:
        reading = peer.read()
        assert reading is not None
        return reading.alive, reading.leaving, peer.connections

    assert seen() == (False, False, None)  # it starts
    board.beat()
    assert seen() == (True, False, 0)
    board.connections = 3
    assert seen() == (True, False, 3)
    now = boards.time.monotonic()
    with monkeypatch.context() as later:
        later.setattr(boards.time, "monotonic", lambda: now + 2.0)
        assert seen() == (True, False, None)  # perhaps paused: nobody leaves connections to it
        later.setattr(boards.time, "monotonic", lambda: now + 4.0)
        assert seen() == (False, False, None)
    board.leave()
    board.beat()
    assert seen() == (True, True, None)
    board.close()
    assert not seen()[0]


def test_a_board_grows(tmp_path: Path) -> None:
    path = tmp_path / "b"
    board, peer = Board(path), Peer(path)
    first = board.numbers(("first",))
    for number in range(5000):
        board.numbers(("many", str(number)), 3)[2] = number
    first[0] += 1  # given out before the file grew
    for found in (board.read(), peer.read(), Board(path).read()):
        assert isinstance(found, Reading)
        assert list(found.numbers[("first",)]) == [1]
        assert [found.numbers[("many", str(number))][2] for number in (0, 17, 4999)] == [0, 17, 4999]
        assert len(found.numbers) == 5001


def test_without_its_file_a_process_counts_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board(tmp_path / "nowhere" / "b")
    board.numbers(("n",))[0] += 1
    assert list(board.read().numbers[("n",)]) == [1]
    assert "metrics are those of this process alone" in caplog.text


def test_a_full_disk_costs_a_metric_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board(tmp_path / "b")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for number in range(3000):
        board.numbers(("n", str(number)))[0] += 1
    assert 1000 < len(board.read().numbers) < 3000
    assert caplog.text.count("no room") == 3000 - len(board.read().numbers)


def test_a_file_taken_away_lives_on_for_who_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "b"
    board, peer = Board(path), Peer(path)
    board.beat()
    assert peer.read() is not None
    path.unlink()
    board.numbers(("n",))[0] = 4
    reading = peer.read()
    assert reading is not None
    assert (reading.alive, list(reading.numbers[("n",)])) == (True, [4])
    make_board(path)
    assert peer.read() is None  # nobody has signed the new one yet
    Board(path, 2).beat()
    reading = peer.read()
    assert reading is not None
    assert (reading.generation, dict(reading.numbers)) == (2, {})


def test_something_else_is_no_board(tmp_path: Path) -> None:
    for content in (b"", b"x", b"{}" * 4000):
        (tmp_path / "b").write_bytes(content)
        assert Peer(tmp_path / "b").read() is None


# --- families


class Process:
    """A process's share of some metrics."""

    def __init__(self, path: Path) -> None:
        self.board = Board(path)
        self.board.beat()
        self.load: dict[tuple[str, ...], float] = {}
        self.counter = Counter(self.board, "c_total", "Counted.", ["kind"])
        self.histogram = Histogram(self.board, "h", "Seen.", ["kind"], (0.1, 1.0))
        self.gauges = [
            Gauge(self.board, name, "Now.", ["kind"], combine, lambda: self.load.items())
            for name, combine in (("sum_now", sum), ("least", min), ("most", max))
        ]

    def publish(self) -> None:
        for gauge in self.gauges:
            gauge.publish()


def page(processes: list[Process], *more: Board) -> dict[str, float]:
    def read() -> Iterator[Reading]:
        yield from (process.board.read() for process in processes)
        yield from (board.read() for board in more)

    families = Families(read)
    families.add(processes[0].counter, processes[0].histogram, *processes[0].gauges)
    registry = CollectorRegistry()
    registry.register(families)
    text = generate_latest(registry).decode()
    return {
        sample.name + "".join(f",{label}" for label in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_sums_over_processes(tmp_path: Path) -> None:
    one, two = Process(tmp_path / "1"), Process(tmp_path / "2")
    one.counter.inc(("a",))
    two.counter.inc(("a",), 2.5)
    two.counter.inc(("b",))
    for process, value in ((one, 0.1), (two, 0.5), (two, 7.0)):
        process.histogram.observe(("a",), value)
    one.load, two.load = {("a",): 3, ("only one",): 1}, {("a",): 4}
    for process in (one, two):
        process.publish()
    assert page([one, two]) == {
        "c_total,a": 3.5,
        "c_total,b": 1,
        "h_bucket,a,0.1": 1,
        "h_bucket,a,1.0": 2,
        "h_bucket,a,+Inf": 3,
        "h_count,a": 3,
        "h_sum,a": 7.6,
        "sum_now,a": 7,
        "sum_now,only one": 1,
        "least,a": 3,
        "least,only one": 1,
        "most,a": 4,
        "most,only one": 1,
    }


def test_the_dead_count_but_their_gauges_do_not(tmp_path: Path) -> None:
    one, two = Process(tmp_path / "1"), Process(tmp_path / "2")
    for process in (one, two):
        process.counter.inc(("a",))
        process.load = {("a",): 2}
        process.publish()
    two.board.close()
    assert page([one, two])["c_total,a"] == 2
    assert page([one, two])["sum_now,a"] == 2
    successor = Process(tmp_path / "2")
    successor.counter.inc(("a",))
    assert page([one, successor])["c_total,a"] == 3
    assert page([one, successor])["sum_now,a"] == 2  # what its predecessor last said is forgotten


def test_labels_that_are_gone_are_not_shown(tmp_path: Path) -> None:
    one = Process(tmp_path / "1")
    one.load = {("a",): 2, ("b",): 0}
    one.publish()
    assert {"sum_now,a", "sum_now,b"} <= set(page([one]))
    one.load = {("b",): 1}
    one.publish()
    assert "sum_now,a" not in page([one])
    one.load = {("a",): 5}
    one.publish()
    assert page([one])["sum_now,a"] == 5
