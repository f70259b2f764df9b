"""What a rollout learns from the gateways' boards: the barrier, and the counts by worker."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.board import (
    CONFIG,
    FRESH_SECONDS,
    INFLIGHT,
    QUEUE_WAITING,
    ROUTE_EPOCH,
    TARGET_ERRORS,
    TARGET_REQUESTS,
    Board,
)
from gateway.families import Gauge
from gateway.fleet.judge import Window
from gateway.fleet.observer import Observer
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.metrics import Metrics
from gateway.routing import Router
from gateway.targets import Table
from tests.gateway.rig import Rig, one_worker, target, until

SLOTS = ("gateway0", "gateway1", "gateway2")


class Shown:
    """The boards of three gateways, and who looks at them."""

    def __init__(self, folder: Path) -> None:
        self.paths = {slot: folder / f"{slot}.board" for slot in SLOTS}
        self.boards: dict[str, Board] = {}
        self.observer = Observer(self.paths)

    def start(self, slot: str, epoch: int, **inflight: float) -> Board:
        board = self.boards[slot] = Board(self.paths[slot])
        board.numbers((ROUTE_EPOCH,))[0] = epoch
        for name, count in inflight.items():
            board.numbers((INFLIGHT, "m", f"{name}.1"))[0] = count
        board.beat()
        return board


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


def test_without_a_living_gateway_nothing_is_applied(shown: Shown) -> None:
    assert (shown.observer.living(), shown.observer.applied(0)) == (frozenset(), False)
    Board(shown.paths["gateway0"])  # it starts
    assert (shown.observer.living(), shown.observer.applied(0)) == (frozenset(), False)
    assert shown.observer.inflight("m", ["a.1"]) == 0
    assert shown.observer.window("m", ["a.1"]) == Window()


def test_who_waits_and_who_follows_the_file(shown: Shown) -> None:
    for slot, digest in zip(SLOTS, (5, 5, 4), strict=True):
        board = shown.start(slot, 1)
        board.numbers((CONFIG,))[0] = digest
        board.numbers((QUEUE_WAITING, "m"))[0] = 2
    assert shown.observer.waiting("m") == 6
    assert shown.observer.waiting("other") == 0
    assert shown.observer.not_following(5) == {"gateway2"}
    shown.boards["gateway2"].close()
    assert (shown.observer.waiting("m"), shown.observer.not_following(5)) == (4, frozenset())


def test_the_slowest_living_gateway_decides(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot, epoch in zip(SLOTS, (7, 8, 7), strict=True):
        shown.start(slot, epoch)
    assert shown.observer.living() == set(SLOTS)
    assert [shown.observer.applied(epoch) for epoch in (6, 7, 8)] == [True, True, False]
    shown.boards["gateway0"].numbers((ROUTE_EPOCH,))[0] = 8
    assert not shown.observer.applied(8)
    shown.boards["gateway2"].close()
    assert shown.observer.living() == {"gateway0", "gateway1"}
    assert shown.observer.applied(8)
    shown.start("gateway2", 9).leave()  # it finishes what it has
    assert shown.observer.living() == set(SLOTS)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + FRESH_SECONDS + 0.1)
    assert (shown.observer.living(), shown.observer.applied(0)) == (frozenset(), False)
    assert shown.observer.latest_epoch() == 9


def test_requests_of_the_living_and_counts_of_all(shown: Shown) -> None:
    shown.start("gateway0", 1, a=3, b=1)
    shown.start("gateway1", 1, a=4, gone=math.nan)
    dead = shown.start("gateway2", 1, a=5)
    for number, slot in enumerate(SLOTS, 1):
        shown.boards[slot].numbers((TARGET_REQUESTS, "m", "a.1"))[0] = 10 * number
        shown.boards[slot].numbers((TARGET_REQUESTS, "m", "b.1"))[0] = 1
        shown.boards[slot].numbers((TARGET_REQUESTS, "other", "a.1"))[0] = 500
    dead.numbers((TARGET_ERRORS, "m", "a.1"))[0] = 2
    dead.close()
    assert shown.observer.inflight("m", ["a.1"]) == 7
    assert shown.observer.inflight("m", {"a.1", "b.1", "gone.1", "never.1"}) == 8
    assert shown.observer.inflight("other", ["a.1"]) == 0
    assert shown.observer.window("m", ["a.1"]) == Window(requests=60, errors=2)
    assert shown.observer.traffic() == (60 + 3 + 3 * 500, 3 + 1 + 4)
    assert shown.observer.window("m", ["a.1", "b.1"]) == Window(requests=63, errors=2)
    for number in range(3000):  # the board outgrows what was mapped
        shown.boards["gateway0"].numbers((TARGET_REQUESTS, "m", f"c.{number}"))[0] = 1
    shown.boards["gateway0"].numbers((TARGET_REQUESTS, "m", "a.1"))[0] += 1
    assert shown.observer.window("m", ["a.1", "c.0", "c.2999"]) == Window(requests=63, errors=2)


def test_what_is_in_flight_is_shown_before_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a claim since the last sign of life would be missed by who sees the new epoch already."""
    path, board = tmp_path / "routes.json", tmp_path / "board"

    def write(epoch: int, **weights: int) -> None:
        targets = tuple(
            Target(slot=slot, generation=1, address=f"unix:/{slot}", weight_bp=weight, state="ready")
            for slot, weight in weights.items()
        )
        routes = Routes(model="m", epoch=epoch, targets=targets)
        write_routes(path, RoutesFile(epoch=epoch, models={"m": routes}))

    changed = []

    def on_change(table: Table) -> None:
        changed.append(table.epoch)
        if len(changed) > 1:
            metrics.show()

    write(1, a=10_000)
    router = Router(path, {}, on_change)
    metrics = Metrics(router, Board(board))
    metrics.publish()
    observer = Observer({"gateway0": board})
    seen = []
    publish = Gauge.publish

    def publish_and_look(gauge: Gauge) -> None:
        publish(gauge)
        seen.append((observer.applied(router.table.epoch), observer.inflight("m", ["a.1"])))

    monkeypatch.setattr(Gauge, "publish", publish_and_look)
    for epoch, targets in ((2, {"a": 0, "b": 10_000}), (3, {"b": 10_000})):  # without weight, then gone
        write(epoch - 1, a=10_000)
        router.refresh()
        backend = router.claim("m", "u")
        assert backend is not None
        assert backend.target.slot == "a"
        write(epoch, **targets)
        seen.clear()
        router.refresh()
        assert (True, 0) not in seen
        assert seen[-1] == (True, 1)
        backend.release()
        metrics.publish()
        assert seen[-1] == (True, 0)


def counts(rig: Rig, name: str = "s") -> tuple[float, float]:
    """(requests, errors) of a target."""
    numbers = rig.app.metrics.board.read().numbers
    found = [numbers.get((key, "m", f"{name}.1")) for key in (TARGET_REQUESTS, TARGET_ERRORS)]
    requests, errors = (one[0] if one else 0 for one in found)
    return requests, errors


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        ({"do": "json"}, (1, 0)),
        ({"do": "big", "size": 300_000}, (1, 0)),
        ({"do": "sse", "stream": True}, (1, 0)),
        ({"do": "sse", "stream": True, "delay": 0.002}, (1, 0)),
        ({"do": "ndjson", "stream": True}, (1, 0)),
        ({"do": "status", "status": 400}, (1, 0)),
        ({"do": "status", "status": 500}, (1, 1)),
        ({"do": "status", "status": 503}, (1, 1)),
        ({"do": "sse", "stream": True, "die_at": 4}, (1, 1)),
        ({"do": "sse", "stream": True, "die_at": 4, "torn": True}, (1, 1)),
        ({"do": "sse", "stream": True, "fail_at": 4}, (1, 1)),
        ({"do": "ndjson", "stream": True, "fail_at": 4, "delay": 0.002}, (1, 1)),
        ({"do": "ndjson", "stream": True, "die_at": 4}, (1, 1)),
        ({"do": "short"}, (1, 1)),
        ({"do": "garbage"}, (1, 1)),
        ({"do": "eof"}, (1, 1)),
        ({"do": "refuse", "why": "draining"}, (0, 0)),
        ({"do": "refuse", "why": "queue_full"}, (0, 0)),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
async def test_what_a_worker_made_of_a_request(
    tmp_path: Path, fake: dict[str, Any], expected: tuple[int, int]
) -> None:
    async with one_worker(tmp_path) as rig:
        with contextlib.suppress(httpx.RemoteProtocolError):  # a body that stays short
            await rig.ask(**fake)
        await rig.idle()
        assert counts(rig) == expected


async def test_who_leaves_says_nothing_of_the_worker(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for fake in ({"do": "hang"}, {"do": "sse", "stream": True, "stop_at": 3}):
            asked = asyncio.create_task(rig.ask(**fake))
            await until(lambda: rig.inflight() == 1)
            await asyncio.sleep(0.05)
            asked.cancel()
            await rig.idle()
        assert counts(rig) == (0, 0)


async def test_a_worker_answers_for_what_it_lost_though_another_one_answered(tmp_path: Path) -> None:
    rig = Rig(tmp_path, health={"max_fails": 1000})
    good, bad = await rig.worker("good"), await rig.worker("bad")
    rig.route(target(good, slot="good"), target(bad, slot="bad"))
    bad.fault = {"do": "eof"}
    async with rig.running():
        answers = [await rig.post() for _ in range(10)]
        assert {answer.status_code for answer in answers} == {200}
        assert counts(rig, "good") == (10, 0)
        lost = len(bad.requests)
        assert lost >= 3
        assert counts(rig, "bad") == (lost, lost)
        await bad.stop()  # refused connections: it took nothing
        assert (await rig.post()).status_code == 200
        assert counts(rig, "bad") == (lost, lost)
