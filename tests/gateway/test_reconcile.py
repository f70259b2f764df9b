"""What another fleet file means for a running fleet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gateway.config import FleetFile
from gateway.fleet.reconcile import EFFECTS, Plan, reconcile
from tests.conftest import ROOT

BASE: dict[str, Any] = {
    "gateway": {"port": 0},
    "models": [
        {"name": "a", "source": "o/a"},
        {"name": "b", "source": "o/b", "aliases": ["bee"], "replicas": 2},
    ],
}


def fleet(**sections: Any) -> FleetFile:
    return FleetFile(**{**BASE, **sections})


def plan(**sections: Any) -> Plan:
    return reconcile(fleet(), fleet(**sections))


def model(name: str, **keys: Any) -> dict[str, Any]:
    """A model of BASE with other keys."""
    known = {entry["name"]: entry for entry in BASE["models"]}
    return {**known[name], **keys}


def block_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(block_in, get_args(annotation)) if found), None)


def unclassified(block: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in block.model_fields.items():
        key, inner = path + name, block_in(field.annotation)
        if key in EFFECTS:
            continue
        if inner is None:
            yield key
        else:
            yield from unclassified(inner, f"{key}[]." if "tuple" in str(field.annotation) else f"{key}.")


def classified(block: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in block.model_fields.items():
        key, inner = path + name, block_in(field.annotation)
        if key in EFFECTS:
            yield key
        elif inner is not None:
            yield from classified(inner, f"{key}[]." if "tuple" in str(field.annotation) else f"{key}.")


def test_every_key_of_the_fleet_file_has_an_effect() -> None:
    assert list(unclassified(FleetFile)) == []
    assert set(classified(FleetFile)) == set(EFFECTS)


def test_the_page_on_configuration_says_the_same() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page.partition("| how a change is taken over |")[2].partition("\n\n")[0]
    places = {
        "while everything runs": "live",
        "workers are added": "replicas",
        "by a rollout": "swap",
        "gateway processes are replaced": "gateways",
        "by processes that start": "next_start",
        "`pagefleet down`": "restart",
    }
    documented = {}
    for row in table.splitlines()[2:]:
        how, keys = row.strip("| ").split(" | ")
        (effect,) = [effect for words, effect in places.items() if how.startswith(words)]
        documented |= dict.fromkeys(re.findall(r"`([^`]+)`", keys), effect)
    assert documented == {key: effect for key, effect in EFFECTS.items() if effect is not None}


def test_the_same_file_changes_nothing() -> None:
    same = plan()
    assert same.empty
    assert same.by_action("unchanged") == ("a", "b")
    assert same.fleet == ()


def test_models_come_and_go() -> None:
    changed = plan(models=[model("b"), {"name": "c", "source": "o/c", "replicas": 3}])
    assert [(one.name, one.action, one.replicas) for one in changed.models] == [
        ("b", "unchanged", (2, 2)),
        ("c", "added", (0, 3)),
        ("a", "removed", (1, 0)),
    ]
    assert not changed.empty


@pytest.mark.parametrize(
    ("keys", "key", "effect"),
    [
        ({"aliases": ["bee", "buzz"]}, "models[].aliases", "live"),
        ({"limits": {"qps": 3}}, "models[].limits", "live"),
        ({"golden": [{"prompt": "2+2?"}]}, "models[].golden", "live"),
        ({"judge": {"min_requests": 9}}, "models[].judge", "live"),
        ({"replicas": 1}, "models[].replicas", "replicas"),
        ({"source": "o/other"}, "models[].source", "swap"),
        ({"worker": {"max_num_seqs": 9}}, "models[].worker.max_num_seqs", "swap"),
    ],
)
def test_a_models_keys(keys: dict[str, Any], key: str, effect: str) -> None:
    changed = plan(models=[model("a"), model("b", **keys)])
    assert changed.by_action("unchanged") == ("a",)
    (b,) = [one for one in changed.models if one.name == "b"]
    assert b.action == "changed"
    assert [(change.key, change.effect) for change in b.changes] == [(key, effect)]
    assert (b.has("swap"), bool(changed.swaps)) == (effect == "swap", effect == "swap")


def test_each_option_that_differs_is_named_with_both_values() -> None:
    before = fleet(models=[model("a", worker={"max_num_seqs": 4, "gpus": [0]})])
    after = fleet(models=[model("a", worker={"max_num_seqs": 8, "gpus": [1], "seed": 3})])
    changes = reconcile(before, after).models[0].changes
    assert {change.key.removeprefix("models[].worker."): (change.old, change.new) for change in changes} == {
        "max_num_seqs": (4, 8),
        "gpus": ([0], [1]),
        "seed": (0, 3),
    }


@pytest.mark.parametrize(
    ("settings", "key", "effect"),
    [
        ({"port": 0, "timeouts": {"total": "5m"}}, "gateway.timeouts.total", "live"),
        ({"port": 0, "limits": {"default": {"qps": 2}}}, "gateway.limits.default.qps", "live"),
        ({"port": 0, "auth": {"mode": "keys"}}, "gateway.auth.mode", "gateways"),
        ({"port": 0, "audit": {"file": "/tmp/a"}}, "gateway.audit.file", "gateways"),
        ({"port": 9000}, "gateway.port", "restart"),
        ({"port": 0, "processes": 2}, "gateway.processes", "restart"),
    ],
)
def test_the_gateways_keys(settings: dict[str, Any], key: str, effect: str) -> None:
    changed = plan(gateway=settings)
    assert [(change.key, change.effect) for change in changed.fleet] == [(key, effect)]
    assert changed.replaces_gateways == (effect == "gateways")
    assert bool(changed.restarts) == (effect == "restart")
    assert changed.by_action("unchanged") == ("a", "b")


def test_the_supervisors_keys() -> None:
    changed = plan(supervisor={"state_dir": "/elsewhere", "start_timeout": "3m", "stall_timeout": "9s"})
    assert {change.key: change.effect for change in changed.fleet} == {
        "supervisor.state_dir": "restart",
        "supervisor.start_timeout": "live",
        "supervisor.stall_timeout": "next_start",
    }


def test_what_a_rollout_has_changed_stays_until_the_file_says_something_new() -> None:
    runs = {"b": fleet(models=[model("b", source="o/b2")]).models[0]}
    changed = reconcile(fleet(), fleet(models=[model("a"), model("b", aliases=[])]), runs)
    (b,) = [one for one in changed.models if one.name == "b"]
    assert [change.key for change in b.changes] == ["models[].aliases"]
    caught_up = reconcile(fleet(), fleet(models=[model("a"), model("b", source="o/b2")]), runs)
    assert caught_up.empty
    further = reconcile(fleet(), fleet(models=[model("a"), model("b", source="o/b3")]), runs)
    (swap,) = further.swaps
    assert [(change.old, change.new) for change in swap.changes] == [("o/b2", "o/b3")]


def test_defaults_matter_only_where_a_model_has_them() -> None:
    assert plan(defaults={"seed": 3}).empty  # `load_fleet` gives them to the models, which say what differs


def test_a_password_is_not_shown() -> None:
    changed = plan(gateway={"port": 0, "redis_url": "redis://me:secret@h:1/0"})
    (change,) = changed.fleet
    assert (change.old, change.new, change.effect) == (None, "redis://***@h:1/0", "restart")
