"""Which worker a request gets, by state, weight, load and user; and routes that are old or can't be used."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway import routing
from gateway.health import Health
from gateway.routing import Router, RouterSettings
from gateway.targets import Backend, shares_of, sticky
from tests.gateway.routed import claim, ready, slots, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.json"


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
