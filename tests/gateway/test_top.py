"""The operator's page: numbers from boards and workers' pages, rates of two looks, 80 columns."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from functools import partial
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from gateway.board import Board
from gateway.cli import main as pagefleet
from gateway.cli.page import age, line, number, page, percent, seconds, size
from gateway.cli.top import View, fitted
from gateway.fleet.admin import FleetStatus
from gateway.fleet.figures import Look, Observatory, Row, parse_page, quantile, rows
from gateway.fleet.rollout import Options, Rollout, Version
from gateway.fleet.rollout.model import Entry
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.unit import UnitStatus
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.supervised import PATIENCE, fleet_file, running

PAGE = """# TYPE pagefleet_kv_cache_usage_ratio gauge
pagefleet_kv_cache_usage_ratio{model_name="m"} 0.25
# TYPE pagefleet_time_to_first_token_seconds histogram
pagefleet_time_to_first_token_seconds_bucket{le="0.1",model_name="m"} %d
pagefleet_time_to_first_token_seconds_bucket{le="0.2",model_name="m"} %d
pagefleet_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} %d
pagefleet_time_to_first_token_seconds_count{model_name="m"} %d
pagefleet_time_to_first_token_seconds_sum{model_name="m"} 1.0
"""


def fleet_status(*units: UnitStatus) -> FleetStatus:
    return FleetStatus(
        supervisor=1, state_dir="", url="http://h:1", started=0, stopping=False, epoch=7, units=units
    )


def gateway_board(state: StateDir, slot: str) -> Board:
    state.boards.mkdir(parents=True, exist_ok=True)
    board = Board(state.board(slot), 1)
    board.beat()
    return board


def count(board: Board, target: str, status: str, by: float) -> None:
    board.numbers(("pagefleet_gateway_requests_total", "m", target, status))[0] += by


async def test_numbers_of_two_gateways_and_a_worker(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.make()
    boards = [gateway_board(state, slot) for slot in ("gateway0", "gateway1")]
    worker = await FakeWorker().start(str(tmp_path / "w.sock"))
    worker.metrics = (PAGE % (0, 0, 5, 5)).encode()
    ready = Target(slot="m-0", generation=2, address=worker.address, state="ready", weight_bp=9500)
    canary = Target(
        slot="m-alt-0", generation=1, address="unix:/gone", state="ready", weight_bp=500, variant="b"
    )
    routes = Routes(model="m", epoch=1, targets=(ready, canary))
    write_routes(state.routes, RoutesFile(epoch=1, models={"m": routes}))
    status = fleet_status(
        UnitStatus(slot="m-0", role="worker", model="m", state="ready", generation=2, restarts=1),
        UnitStatus(slot="m-alt-0", role="worker", model="m", state="ready", generation=1),
        UnitStatus(slot="gateway0", role="gateway", state="ready", generation=1),
        UnitStatus(slot="gateway1", role="gateway", state="ready", generation=1),
    )
    for board in boards:
        count(board, "m-0.2", "200", 10)
        board.numbers(("pagefleet_gateway_inflight", "m", "m-0.2"))[0] = 3
        board.numbers(("pagefleet_gateway_queue_waiting", "m"))[0] = 2
    boards[0].connections = 4
    observatory = Observatory(state)
    try:
        first = await observatory.look(status)
        count(boards[0], "m-0.2", "200", 6)
        count(boards[1], "m-0.2", "502", 2)
        worker.metrics = (PAGE % (10, 20, 25, 25)).encode()
        second = await observatory.look(status)
    finally:
        await observatory.aclose()
        await worker.stop()
    by_slot = {row.slot: row for row in rows(status, second, first)}
    assert list(by_slot) == ["gateway0", "gateway1", "m-0", "m-alt-0"]
    m = by_slot["m-0"]
    assert (m.target, m.in_flight, m.weight, m.kv_usage, m.restarts) == ("m-0.2", 6, 0.95, 0.25, 1)
    assert m.qps == pytest.approx(8 / (second.at - first.at))
    assert m.error_ratio == pytest.approx(2 / 8)
    assert m.ttft_p95 == pytest.approx(0.19)  # of the 20 since the first look
    b = by_slot["m-alt-0"]
    assert (b.weight, b.in_flight, b.qps, b.error_ratio, b.kv_usage) == (0.05, 0, 0, None, None)
    assert by_slot["gateway0"].connections == 4
    assert by_slot["gateway1"].qps == pytest.approx(2 / (second.at - first.at))
    assert second.queued == {"m": 4}
    unpaired = {row.slot: row for row in rows(status, second, None)}["m-0"]
    assert (unpaired.qps, unpaired.ttft_p95, unpaired.in_flight) == (None, None, 6)


async def test_a_dead_gateway_has_counted_but_carries_nothing(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.make()
    board = gateway_board(state, "gateway")
    count(board, "m-0.1", "200", 5)
    board.numbers(("pagefleet_gateway_inflight", "m", "m-0.1"))[0] = 3
    board.close()
    observatory = Observatory(state)
    look = await observatory.look(fleet_status(UnitStatus(slot="gateway", role="gateway", generation=1)))
    await observatory.aclose()
    assert (look.requests, look.inflight, look.connections) == ({"m-0.1": 5}, {}, {})


def test_a_page_that_is_none_is_an_error() -> None:
    assert parse_page(PAGE % (1, 2, 3, 3)).ttft == {0.1: 1, 0.2: 2, float("inf"): 3}
    with pytest.raises(ValueError, match="Invalid"):
        parse_page("{'not': 'metrics'}")


@pytest.mark.parametrize(
    ("grown", "expected"),
    [
        ({0.1: 0, 0.2: 0}, None),
        ({0.1: 100, 0.2: 100, float("inf"): 100}, 0.095),
        ({0.1: 0, 0.2: 100, float("inf"): 100}, 0.195),
        ({0.1: 0, 0.2: 0, float("inf"): 9}, 0.2),  # beyond what the buckets tell
        ({}, None),
    ],
)
def test_percentiles_of_a_histogram(grown: dict[float, float], expected: float | None) -> None:
    before = dict.fromkeys(grown, 7.0)
    now = {bound: count + 7 for bound, count in grown.items()}
    found = quantile(now, before, 0.95)
    assert found == (None if expected is None else pytest.approx(expected))


def test_it_fits_into_80_columns() -> None:
    status = fleet_status(
        UnitStatus(slot="gateway", role="gateway", state="ready"),
        UnitStatus(slot="a-model-with-a-long-name-0", role="worker", model="a-model/with-a-long-name"),
    )
    full = Row(
        slot="a-model-with-a-long-name-0",
        role="worker",
        model="a-model/with-a-long-name",
        generation=12,
        state="draining",
        phase="",
        pid=1,
        restarts=3,
        weight=1.0,
        in_flight=1024,
        qps=1234.5,
        ttft_p95=0.123,
        error_ratio=0.123,
        kv_usage=1.0,
        memory=3 << 30,
        uptime=86400 * 3,
    )
    gateway = Row(
        slot="gateway", role="gateway", model=None, generation=1, state="ready", phase="", pid=2, restarts=0
    )
    look = Look(at=0, queued={"a-model/with-a-long-name": 12})
    console = Console(width=80, record=True, file=StringIO())
    console.print(page(status, [gateway, full], look, width=80, window=15.0))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    row = next(one for one in text.splitlines() if "draining" in one)
    assert re.search(r"draining +100% +1024 +1234 +123ms +12% +100% +3.0G +3d +3", row), text
    assert "12 wait" in text
    wide = Console(width=140, record=True, file=StringIO())
    wide.print(page(status, [gateway, full], look, width=140))
    assert "a-model-with-a-long-name-0.12" in wide.export_text()
    assert line(full).endswith(
        "a-model-with-a-long-name-0.12 model=a-model/with-a-long-name state=draining weight=100% "
        "inflight=1024 qps=1234 ttft_p95=123ms errors=12% kv=100% memory=3.0G uptime=3d restarts=3"
    )


@pytest.mark.parametrize("width", [24, 30, 40, 50, 60, 79])
def test_on_a_narrow_terminal_numbers_are_whole_or_left_out(width: int) -> None:
    full = Row(
        slot="a-model-with-a-name-alt-0", role="worker", model="m", generation=12, state="draining", phase="",
        pid=1, restarts=7, weight=1.0, in_flight=1024, qps=1234.5, ttft_p95=0.567, error_ratio=0.12,
        kv_usage=0.89, memory=3 << 30, gpu_memory=34 << 30, uptime=86400 * 6,
    )  # fmt: skip
    whole = ("draining", "100%", "1024", "1234", "567ms", "12%", "89%", "3.0G", "34G", "6d", "7")
    console = Console(width=width, record=True, file=StringIO())
    console.print(page(fleet_status(), [full], Look(at=0), width=width))
    (row,) = [line.split() for line in console.export_text().splitlines() if "…" in line]
    assert row[0].startswith("a-")
    assert row[0].endswith("0.12"), "slots of a model differ at their ends"
    assert set(row[1:]) <= set(whole)
    assert row[1] == "draining"
    assert len(row) > (width - 12) // 10


def rollout_under_way() -> Rollout:
    log = tuple(Entry(0.0, "judging", f"line {number}") for number in range(9))
    return Rollout(
        id="r", model="m", old=Version(source="o/old"), new=Version(source="o/new"), options=Options(),
        started=0.0, phase="judging", step=0, standby_bp=500, log=log,
    )  # fmt: skip


@pytest.mark.parametrize(("height", "lines"), [(24, 4), (9, 2), (8, 1), (7, 0), (2, 0)])
def test_on_a_low_terminal_the_log_makes_room_for_the_rollout(height: int, lines: int) -> None:
    status = msgspec.structs.replace(fleet_status(), rollouts=(rollout_under_way(),))
    console = Console(width=80, height=height, record=True, file=StringIO())
    console.print(fitted(View(status, Look(at=0), [], None), console))
    text = console.export_text()
    assert "judging" in text
    assert [f"line {number}" in text for number in range(9)].count(True) == lines
    assert lines == 0 or "line 8" in text


def test_numbers_have_few_characters() -> None:
    assert [number(n) for n in (None, 0, 3.21, 99.94, 100.4, 9999, 12345)] == [
        *("-", "0", "3.2", "99.9", "100", "9999", "12k"),
    ]
    assert [percent(n) for n in (None, 0, 0.0004, 0.005, 0.05, 1)] == ["-", "0%", ".1%", ".5%", "5%", "100%"]
    assert [seconds(n) for n in (None, 0.0851, 0.9999, 9.96, 42)] == ["-", "85ms", "1.0s", "10s", "42s"]
    assert [size(n << 20) for n in (0, 850, 1024, 20 << 10, 2 << 20)] == ["0M", "850M", "1.0G", "20G", "2.0T"]
    assert [age(n) for n in (None, 0, 119, 120, 7199, 7200, 9 * 86400)] == [
        *("-", "0s", "119s", "2m", "119m", "2h", "9d"),
    ]


async def test_top_of_a_fleet_that_runs(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        await fleet.until_state("gateway", "ready")
        command = ["top", "--interval", "0.2", "--state-dir", str(fleet.state.root)]
        shown = await asyncio.to_thread(CliRunner().invoke, pagefleet, [*command, "--json"])
        assert shown.exit_code == 0, shown.output
        document = json.loads(shown.output)
        processes = {one["slot"]: one for one in document["processes"]}
        assert set(processes) == {"gateway", "ok-0"}
        worker = processes["ok-0"]
        assert (worker["model"], worker["generation"], worker["state"]) == ("ok", 1, "ready")
        assert (worker["weight"], worker["in_flight"], worker["qps"], worker["restarts"]) == (1.0, 0, 0.0, 0)
        assert worker["memory"] > 5 << 20
        assert 0 <= worker["uptime"] < 60
        lines = tmp_path / "lines"
        with lines.open("w") as output:
            argv = [sys.executable, "-m", "gateway.cli", *command]
            top = await asyncio.create_subprocess_exec(*argv, stdout=output)
        ready = re.compile(r"^\d\d:\d\d:\d\d ok-0\.1 model=ok state=ready weight=100% inflight=0 ", re.M)
        await fleet.until(lambda: ready.search(lines.read_text()))
    assert await top.wait() == 0  # it ends with the fleet
    assert lines.read_text().endswith("the fleet is down\n")


def test_without_a_fleet(tmp_path: Path) -> None:
    result = CliRunner().invoke(pagefleet, ["top", "--state-dir", str(tmp_path)])
    assert (result.exit_code, "no fleet is up" in result.output) == (1, True)


class Terminal:
    """A command of `pagefleet` on a terminal of 80 columns."""

    def __init__(self, *arguments: str, kind: str = "xterm") -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": kind},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(theirs)
        self.shown = ""

    def read(self) -> str:
        """All that was shown so far."""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._ours, 65536):
                self.shown += data.decode(errors="replace")
        return self.shown

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, self.read()) is not None

    async def interrupted(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return await asyncio.to_thread(self.process.wait, PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


async def test_the_page_on_a_terminal(tmp_path: Path) -> None:
    async with running(fleet_file(tmp_path, "ok")) as fleet:
        await fleet.until_state("ok-0", "ready")
        where = ("--state-dir", str(fleet.state.root))
        for command in (("top", "-n", "0.2", *where), ("status", "--watch", *where)):
            terminal = Terminal(*command)
            try:
                await fleet.until(partial(terminal.shows, r"rates over"))
                await fleet.until(partial(terminal.shows, r"ok-0\.1 .*ready.* +100% +0 +0 "))
                assert await terminal.interrupted() == 0, terminal.read()
                assert "Traceback" not in terminal.read()
            finally:
                terminal.close()
        for command in (("top", "-n", "0.2", *where), ("status", "--watch", *where)):
            terminal = Terminal(*command, kind="dumb")
            try:
                await fleet.until(partial(terminal.shows, r"ok-0"))
                assert "\x1b" not in terminal.shown
                assert await terminal.interrupted() == 0, terminal.read()
            finally:
                terminal.close()
