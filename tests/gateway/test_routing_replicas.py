"""Replicas: where a conversation stays, who is full, and who has failed."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway import routing
from gateway.routing import Router, RouterSettings
from tests.gateway.routed import claim, replicas, slots, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.json"


def chat(*texts: str, **fields: Any) -> bytes:
    roles = itertools.cycle(["user", "assistant"])
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    system = {"role": "system", "content": "Be brief. " * 40}
    return json.dumps({"model": "m", **fields, "messages": [system, *turns]}).encode()


def homes(router: Router, conversations: int) -> list[str]:
    found = []
    for number in range(conversations):
        backend = claim(router, body=chat(f"question {number}"))
        found.append(backend.target.slot)
        backend.release()
    return found


def test_a_conversation_stays_with_its_replica(path: Path) -> None:
    replicas(path, 4)
    router = Router(path, {})
    for number in range(40):
        turns = [f"{{question}} {number}", "an answer", "another question", "an answer", "a third"]
        slots = set()
        for length in (1, 3, 5):
            backend = claim(router, f"user{length}", body=chat(*turns[:length]))
            slots.add(backend.target.slot)
            backend.release()
        assert len(slots) == 1
    counts = [homes(router, 400).count(f"r{index}") for index in range(4)]
    assert all(60 <= count <= 140 for count in counts)


def test_a_changed_set_of_replicas_moves_few_conversations(path: Path) -> None:
    replicas(path, 4)
    router = Router(path, {})
    before = homes(router, 400)
    replicas(path, 5, epoch=2)
    router.refresh()
    after = homes(router, 400)
    moved = [new for old, new in zip(before, after) if old != new]
    assert set(moved) == {"r4"}
    assert len(moved) == pytest.approx(80, abs=35)
    replicas(path, 4, epoch=3)
    router.refresh()
    assert homes(router, 400) == before


def test_a_popular_conversation_overflows_to_the_least_busy(path: Path) -> None:
    replicas(path, 4)
    router = Router(path, {})
    for _ in range(100):
        claim(router, body=chat("the same for all"))
    loads = sorted(backend.inflight for backend in router.table.backends.values())
    assert sum(loads) == 100
    assert loads[-1] <= 1.25 * 25 + 1
    assert loads[0] >= 20


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'"messages"', b'{"messages":', b'{"prompt": 3}', b'{"messages": []}', b"\xff" * 99],
)
def test_any_body_finds_a_replica(path: Path, body: bytes) -> None:
    replicas(path, 3)
    router = Router(path, {})
    for _ in range(9):
        claim(router, body=body)
    assert sum(backend.inflight for backend in router.table.backends.values()) == 9


def test_a_full_worker_is_not_given_more_and_the_others_are(path: Path) -> None:
    replicas(path, 2)
    router = Router(path, {})
    for backend in router.table.backends.values():
        backend.limit = 2
    claims = [claim(router, body=chat("same")) for _ in range(4)]
    assert router.claim("m", "u") is None
    claims[0].release()
    assert claim(router).target == claims[0].target
    assert router.claim("m", "u", {"r0.1", "r1.1", "x"}.difference({"r1.1"})) is None


async def test_a_released_place_goes_to_who_waits(path: Path) -> None:
    replicas(path, 2)
    router = Router(path, {})
    for backend in router.table.backends.values():
        backend.limit = 1
    first, second = claim(router), claim(router)
    waiting = [asyncio.create_task(router.wait("m", f"u{n}", "normal", 20, (), b"")) for n in range(3)]
    await asyncio.sleep(0)
    first.release()
    assert router.claim("m", "u") is None  # nobody overtakes
    assert (await waiting[0]).target == first.target
    router.table.backends["m", second.target.id].limit = 2
    router.queue("m").place()
    assert (await waiting[1]).target == second.target
    write(path, epoch=2)
    router.refresh()  # no worker left: nobody waits for nothing
    with pytest.raises(ApiError) as caught:
        await waiting[2]
    assert caught.value.status == 503


def probed(path: Path, **settings: Any) -> Router:
    return Router(path, {}, settings=RouterSettings(**settings))


def test_failures_eject_a_target_for_a_while_then_one_trial_decides(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(routing.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    replicas(path, 2)
    router = probed(path, max_fails=3, fail_timeout=10)
    bad = router.table.backends["m", "r0.1"]

    def taken(count: int) -> int:
        backends = [claim(router) for _ in range(count)]
        for backend in backends:
            backend.release()
        return sum(backend is bad for backend in backends)

    for _ in range(2):
        bad.health.failed()
    now += 11  # those were too long ago
    bad.health.failed()
    bad.health.failed()
    assert taken(10) == 5
    bad.health.failed()
    assert (taken(10), bad.health.serving) == (0, False)
    now += 9
    assert taken(10) == 0
    now += 2
    assert taken(10) == 1  # the trial
    bad.health.failed()
    now += 9
    assert taken(10) == 0
    now += 2
    assert taken(10) == 1  # its client left: the next trial comes later
    now += 11
    assert taken(10) == 1
    bad.health.succeeded()
    assert (taken(10), bad.health.clear) == (5, True)
    assert [record.levelname for record in caplog.records if "target" in record.message] == [
        "WARNING",
        "INFO",
    ]


def test_the_last_target_is_never_ejected(path: Path) -> None:
    replicas(path, 2)
    router = probed(path, max_fails=1, fail_timeout=1000)
    for backend in router.table.backends.values():
        backend.health.failed()
    assert set(slots(router, 10)) == {"r0", "r1"}
    router.table.backends["m", "r0.1"].health.probed(identified=True, up=False)
    router.table.backends["m", "r1.1"].health.probed(identified=True, up=False)
    assert set(slots(router, 10)) == {"r0", "r1"}
    assert claim(router, tried={"r0.1"}).target.slot == "r1"


def test_max_fails_0_counts_nothing(path: Path) -> None:
    replicas(path, 2)
    router = probed(path, max_fails=0)
    for _ in range(100):
        router.table.backends["m", "r0.1"].health.failed()
    assert set(slots(router, 10)) == {"r0", "r1"}


def test_who_is_not_identified_gets_nothing_not_even_as_the_last(path: Path) -> None:
    replicas(path, 2)
    router = probed(path, probed=True)
    assert router.claim("m", "u") is None
    liar, honest = (router.table.backends["m", f"r{index}.1"] for index in range(2))
    liar.health.probed(identified=False, up=False, why="x.1 answers at its address")
    assert router.claim("m", "u") is None
    assert router.not_ready() == []
    honest.health.probed(identified=True, up=True)
    assert slots(router, 10) == ["r1"] * 10
    honest.health.probed(identified=False, up=False)
    with pytest.raises(ApiError) as caught:
        router.claim("m", "u")
    assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
    assert router.not_ready() == ["m"]


def test_batch_work_keeps_no_interactive_request_from_a_worker(path: Path) -> None:
    replicas(path, 1)
    router = Router(path, {})
    (worker,) = router.table.backends.values()
    worker.limit = 3
    for _ in range(3):
        assert claim(router, priority="low") is worker
    assert router.claim("m", "u", priority="low") is None
    for priority in ("normal", "normal", "normal", "high", "high", "high"):
        claim(router, priority=priority)
    for priority in ("normal", "low", "high"):
        assert router.claim("m", "u", priority=priority) is None
    worker.release("high")
    assert router.claim("m", "u", priority="normal") is None
    claim(router, priority="high")
    assert (worker.inflight, worker.by_class) == (9, [3, 3, 3])
