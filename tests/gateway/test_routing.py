from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway import routing
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.health import Health
from gateway.routing import Router, RouterSettings
from gateway.targets import Backend, shares_of, sticky


def ready(slot: str, weight_bp: int = 10_000, **fields: Any) -> Target:
    return Target(
        slot=slot, generation=1, address=f"unix:/{slot}", weight_bp=weight_bp, **{"state": "ready", **fields}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.json"


def write(path: Path, *targets: Target, epoch: int = 1, **fields: Any) -> None:
    routes = Routes(model="m", epoch=epoch, aliases=("nick",), targets=targets, **fields)
    write_routes(path, RoutesFile(epoch=epoch, models={"m": routes}))


def claim(router: Router, user: str = "u", **options: Any) -> Backend:
    backend = router.claim("m", user, **options)
    assert backend is not None
    return backend


def slots(router: Router, count: int, user: str = "u") -> list[str]:
    return [claim(router, user).target.slot for _ in range(count)]


def test_only_ready_targets_with_weight_get_requests(path: Path) -> None:
    write(
        path, ready("a", state="starting"), ready("b", state="draining"), ready("c", weight_bp=0), ready("d")
    )
    assert set(slots(Router(path, {}), 20)) == {"d"}


def test_the_least_busy_of_equals_is_taken(path: Path) -> None:
    write(path, ready("a"), ready("b"), ready("c"))
    router = Router(path, {})
    taken = [claim(router) for _ in range(30)]
    assert [backend.inflight for backend in {one.target.slot: one for one in taken}.values()] == [10] * 3
    for backend in taken:
        if backend.target.slot == "b":
            backend.release()
    assert slots(router, 5) == ["b"] * 5


def test_quiet_requests_spread_too(path: Path) -> None:
    write(path, ready("a"), ready("b"))
    router = Router(path, {})
    taken = []
    for _ in range(10):
        backend = claim(router)
        taken.append(backend.target.slot)
        backend.release()
    assert taken.count("a") == taken.count("b") == 5


def test_unequal_weights_share_in_proportion(path: Path) -> None:
    write(path, ready("a", 7500), ready("b", 2500))
    taken = slots(Router(path, {}), 100)
    assert taken.count("b") == pytest.approx(25, abs=2)


CLEAR = Health("t", RouterSettings(), probed=False)


def share(weights: list[int], users: int, salt: str = "s") -> list[str]:
    router = Router(Path("none"), {})
    live = [
        Backend("m", ready(f"t{index}", weight, variant=f"v{index}"), CLEAR, router.queue("m"))
        for index, weight in enumerate(weights)
    ]
    return [sticky(shares_of(live), salt, "m", f"user{user}")[0].target.slot for user in range(users)]


def test_sticky_split_keeps_to_the_weights_and_to_the_user() -> None:
    first = share([9000, 1000], 5000)
    assert first == share([9000, 1000], 5000)
    assert first.count("t1") == pytest.approx(500, abs=75)
    assert first != share([9000, 1000], 5000, salt="other")


def test_raising_the_standby_only_moves_users_forward() -> None:
    steps = [share([10_000 - weight, weight], 500) for weight in (0, 100, 500, 2500, 5000, 10_000)]
    for before, after in itertools.pairwise(steps):
        assert all(new == "t1" for old, new in zip(before, after) if old == "t1")
    assert set(steps[-1]) == {"t1"}


def test_sticky_split_fills_the_share_of_a_target_that_refused(path: Path) -> None:
    write(path, ready("a", 5000, variant="old"), ready("b", 5000, variant="new"), salt="s")
    router = Router(path, {})
    users = [f"u{index}" for index in range(50)]
    assert {claim(router, user).target.slot for user in users} == {"a", "b"}
    assert {claim(router, user, tried={"b.1"}).target.slot for user in users} == {"a"}


def test_names(path: Path) -> None:
    write(path, ready("a"))
    router = Router(path, {"m": ["nick", "other"], "later": ["l"]})
    assert router.resolve("m") == router.resolve("nick") == router.resolve("other") == "m"
    assert router.resolve("l") == "later"
    assert dict(router.models()) == {"m": "m", "nick": "m", "other": "m", "later": "later", "l": "later"}
    assert router.not_ready() == ["later"]
    with pytest.raises(ApiError) as caught:
        router.resolve("nope")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_a_retired_model_is_found_by_nobody_and_serves_who_waits(path: Path) -> None:
    write(path, ready("a"), retired=True)
    router = Router(path, {})
    for name in ("m", "nick"):
        with pytest.raises(ApiError) as caught:
            router.resolve(name)
        assert caught.value.status == 404
    assert list(router.models()) == []
    assert router.not_ready() == []
    assert claim(router).target.slot == "a"  # by one that was resolved before


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([], "model_starting"),
        (["starting", "starting"], "model_starting"),
        (["starting", "down"], "model_unavailable"),
        (["draining"], "model_unavailable"),
    ],
)
def test_known_model_without_a_live_target_is_503(path: Path, states: list[Any], code: str) -> None:
    write(path, *(ready(f"t{index}", state=state) for index, state in enumerate(states)))
    with pytest.raises(ApiError) as caught:
        Router(path, {}).claim("m", "u")
    assert (caught.value.status, caught.value.code) == (503, code)
    assert int(caught.value.headers["retry-after"]) >= 1


def test_inflight_outlives_the_table_that_counted_it(path: Path) -> None:
    write(path, ready("a"), ready("b", weight_bp=0))
    router = Router(path, {})
    old = claim(router)
    write(path, ready("b"), epoch=2)
    router.refresh()
    assert claim(router).target.slot == "b"
    assert router.table.backends["m", "a.1"] is old
    old.release()
    write(path, ready("b"), epoch=3)
    router.refresh()
    assert set(router.table.backends) == {("m", "b.1")}
    assert router.table.backends["m", "b.1"].inflight == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"epoch": 9, "models": {"m": 1}}',
        b'{"epoch": 9, "models": {"m": {"model": "m", "epoch": 9, "targets": '
        b'[{"slot": "a", "generation": 1, "address": "ftp://x", "state": "ready"}]}}}',
        b"[" * 100_000,
        None,
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_logged_once(
    path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, ready("a"), epoch=4)
    router = Router(path, {})
    caplog.set_level(logging.WARNING)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for _ in range(3):
        router.refresh()
        assert claim(router).target.slot == "a"
    assert router.table.epoch == 4
    assert [str(path) in message and "epoch 4" in message for message in caplog.messages] == [True]
    write(path, ready("b"), epoch=5)
    router.refresh()
    assert claim(router).target.slot == "b"


def test_a_stale_table_is_read_again_before_a_claim(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, ready("a"))
    router = Router(path, {})
    write(path, ready("b"), epoch=2)
    assert claim(router).target.slot == "a"
    now = routing.time.monotonic()
    monkeypatch.setattr(routing.time, "monotonic", lambda: now + routing.STALE_AFTER + 0.1)
    assert claim(router).target.slot == "b"


def test_a_replaced_file_of_equal_size_and_time_is_seen(path: Path) -> None:
    write(path, ready("a"))
    router = Router(path, {})
    status = os.stat(path)
    write(path, ready("b"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(path).st_size == status.st_size
    router.refresh()
    assert claim(router).target.slot == "b"


def test_a_split_goes_by_user_between_variants_and_by_load_between_replicas(path: Path) -> None:
    write(
        path,
        ready("a0", 4500, variant="old"),
        ready("a1", 4500, variant="old"),
        ready("b0", 500, variant="new"),
        ready("b1", 500, variant="new"),
        salt="s",
    )
    router = Router(path, {})
    users = [f"u{index}" for index in range(2000)]
    first = [claim(router, user).target.slot for user in users]
    again = [claim(router, user).target.slot for user in users]
    assert [slot[0] for slot in first] == [slot[0] for slot in again]
    assert [slot[0] for slot in first].count("b") == pytest.approx(200, abs=50)
    for variant in "ab":
        loads = [b.inflight for b in router.table.backends.values() if b.target.slot[0] == variant]
        assert abs(loads[0] - loads[1]) <= 1


def chat(*texts: str, **fields: Any) -> bytes:
    roles = itertools.cycle(["user", "assistant"])
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    system = {"role": "system", "content": "Be brief. " * 40}
    return json.dumps({"model": "m", **fields, "messages": [system, *turns]}).encode()


def replicas(path: Path, count: int, epoch: int = 1) -> None:
    write(path, *(ready(f"r{index}") for index in range(count)), epoch=epoch)


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


def test_who_finds_nobody_looks_at_the_routes_again(path: Path) -> None:
    """Its successor may be there already: a restarted worker, or one in another place."""
    write(path, ready("a"))
    router = Router(path, {}, settings=RouterSettings(probed=True))
    router.table.backends["m", "a.1"].health.probed(identified=False, up=False, why="it is gone")
    with pytest.raises(ApiError):
        router.claim("m", "u")
    write(path, ready("b"), epoch=2)
    assert router.claim("m", "u") is None  # nobody has asked the new one yet
    router.table.backends["m", "b.1"].health.probed(identified=True, up=True)
    assert claim(router).target.slot == "b"
    with pytest.raises(ApiError):
        router.claim("m", "u", {"b.1"})
    write(path, ready("b"), ready("c"), epoch=3)
    assert router.claim("m", "u", {"b.1"}) is None
    write(path, epoch=4, hold=True)
    assert router.claim("m", "u", {"b.1", "c.1"}) is None


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
