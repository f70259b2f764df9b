"""Which limits hold for whom: the fleet file's, keys' own, and what was set while the fleet runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.identity.identity import Identity, KeyLimits
from gateway.limits import Limit, Scope
from gateway.limits.bounds import Bounds
from gateway.limits.overrides import Entry
from gateway.limits.table import LimitTable


def block(**bounds: Any) -> Any:
    return SimpleNamespace(
        **{"qps": None, "burst": None, "concurrency": None, "tokens_per_minute": None, **bounds}
    )


def table(settings: Any = None, models: Any = None, /, **overrides: Bounds) -> LimitTable:
    """`overrides`: user_ann=Bounds(...) and the like."""
    made = LimitTable(settings or block(), models or {})
    made.apply({name.replace("_", ":", 1): Entry(1, bounds) for name, bounds in overrides.items()})
    return made


def limits(made: LimitTable, who: Identity, model: str = "m") -> dict[Scope, Limit]:
    return {charge.scope: charge.limit for charge in made.plan(who, model).charges}


ANN = Identity("ann")


def keyed(key_id: str = "k", **bounds: Any) -> Identity:
    return Identity("ann", key_id, limits=KeyLimits(**bounds))


def test_without_limits_nothing_is_charged() -> None:
    made = table(None, {"m": None})
    assert made.plan(ANN, "m").charges == ()
    assert made.plan(keyed(), "m").charges == ()


def test_user_key_and_model_are_charged_together() -> None:
    made = table(block(qps=20, burst=40), {"m": block(concurrency=3)})
    assert limits(made, keyed(tokens_per_minute=1000)) == {
        Scope.USER: Limit(qps=20, burst=40),
        Scope.KEY: Limit(tokens_per_minute=1000),
        Scope.MODEL: Limit(concurrency=3),
    }
    assert limits(made, ANN, "other") == {Scope.USER: Limit(qps=20, burst=40)}


def test_a_keys_own_limit_takes_the_place_of_the_default() -> None:
    made = table(block(qps=20, burst=40, concurrency=5))
    assert limits(made, keyed(qps=100)) == {
        Scope.USER: Limit(concurrency=5),
        Scope.KEY: Limit(qps=100),
    }
    # A burst alone is for the default's rate, and the pair moves together.
    assert limits(made, keyed(burst=7)) == {
        Scope.USER: Limit(concurrency=5),
        Scope.KEY: Limit(qps=20, burst=7),
    }
    assert limits(table(), keyed(burst=7)) == {}


def test_what_is_set_for_a_user_holds_for_all_the_users_keys() -> None:
    made = table(block(qps=20), user_ann=Bounds(qps=50, burst=60))
    assert limits(made, keyed(qps=100)) == {
        Scope.USER: Limit(qps=50, burst=60),
        Scope.KEY: Limit(qps=100),
    }
    assert limits(made, Identity("bob")) == {Scope.USER: Limit(qps=20)}


def test_what_was_set_is_over_what_the_file_says_field_by_field() -> None:
    made = table(
        block(qps=20, burst=40, concurrency=5),
        {"m": block(qps=9, concurrency=2)},
        default=Bounds(concurrency=6),
        user_ann=Bounds(qps=5),
        key_k=Bounds(concurrency=1),
        model_m=Bounds(concurrency=None),
    )
    assert limits(made, keyed(concurrency=4, qps=3)) == {
        Scope.USER: Limit(qps=5),  # not with the default's burst; the key has a concurrency of its own
        Scope.KEY: Limit(qps=3, concurrency=1),
        Scope.MODEL: Limit(qps=9),
    }
    assert limits(made, Identity("bob")) == {
        Scope.USER: Limit(qps=20, burst=40, concurrency=6),
        Scope.MODEL: Limit(qps=9),
    }


def test_none_takes_a_limit_away() -> None:
    made = table(block(qps=20, concurrency=5), user_ann=Bounds(qps=None))
    assert limits(made, ANN) == {Scope.USER: Limit(concurrency=5)}
    assert limits(table(block(qps=20), user_ann=Bounds(qps=None)), ANN) == {}


def test_numbers_beyond_all_counting_are_cut() -> None:
    """A key may have been given them; that must not leave it without limits."""
    (limit,) = limits(table(), keyed(qps=0.001, burst=10**12, tokens_per_minute=10**12)).values()
    assert limit.requests is not None
    assert limit.requests.burst < 10_000
    assert limit.tokens_per_minute == 10**9


def test_a_change_is_seen_by_the_next_request() -> None:
    made = table(block(qps=20))
    first = made.plan(ANN, "m")
    assert made.plan(Identity("ann"), "m") is first
    made.apply({"user:ann": Entry(2, Bounds(qps=1))})
    assert limits(made, ANN) == {Scope.USER: Limit(qps=1)}
    # A key that was given other limits is another identity.
    before, after = keyed(qps=1), keyed(qps=2)
    assert limits(made, before)[Scope.KEY].qps == 1
    assert limits(made, after)[Scope.KEY].qps == 2


@pytest.mark.parametrize("count", [30_000])
def test_callers_are_remembered_within_bounds(count: int) -> None:
    made = table(block(qps=20))
    for number in range(count):
        made.plan(Identity(str(number)), "m")
    assert len(made._plans) <= 8192
