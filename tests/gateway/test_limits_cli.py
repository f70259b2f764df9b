"""`pagefleet limits`: what it prints, what it writes, and the codes it ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.fleet.statedir import StateDir
from gateway.identity.identity import KeyLimits
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.limits.bounds import NOTHING, Bounds
from gateway.limits.overrides import FILE, OverridesFile

FLEET = {
    "gateway": {"limits": {"default": {"qps": 20, "burst": 40}}},
    "models": [
        {"name": "m", "aliases": ["nick"], "source": "o/n", "limits": {"concurrency": 8}},
        {"name": "free", "source": "o/n"},
    ],
}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """Of a fleet that has been up."""
    monkeypatch.chdir(tmp_path)
    state = StateDir(tmp_path / ".pagefleet")
    state.make()
    state.config.write_text(json.dumps(FLEET))
    return state


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["limits", *arguments], prog_name="pagefleet")
    assert result.exit_code == code, result.output
    return result


def keys(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["keys", *arguments], prog_name="pagefleet")
    assert result.exit_code == 0, result.output
    return result


def stored(state: StateDir) -> dict[str, Bounds]:
    entries = OverridesFile(state.root / FILE).read()
    return {name: entry.bounds for name, entry in entries.items() if entry.bounds != NOTHING}


def made_key(state: StateDir, **bounds: Any) -> str:
    with KeyStore(state.root / KEYS_FILE, create=True, write=True) as store:
        return store.create("ann", limits=KeyLimits(**bounds))[0].id


def test_set_get_and_unset(state: StateDir) -> None:
    assert invoke("get", "user", "ann").stdout == "user ann: qps 20, burst 40\n"
    result = invoke("set", "user", "ann", "--qps", "5", "--concurrency", "2")
    assert result.stdout == "user ann: now qps 5, concurrency 2 (before: qps 20, burst 40)\n"
    assert stored(state) == {"user:ann": Bounds(qps=5, concurrency=2)}
    # What isn't named stays; another rate has its own burst.
    invoke("set", "user", "ann", "--burst", "9")
    assert stored(state) == {"user:ann": Bounds(qps=5, burst=9, concurrency=2)}
    invoke("set", "user", "ann", "--qps", "6")
    assert stored(state) == {"user:ann": Bounds(qps=6, concurrency=2)}
    invoke("unset", "user", "ann", "--concurrency")
    assert stored(state) == {"user:ann": Bounds(qps=6)}
    assert invoke("unset", "user", "ann").stdout == "user ann: now qps 20, burst 40 (before: qps 6)\n"
    assert stored(state) == {}
    invoke("unset", "user", "ann")


def test_none_takes_a_limit_of_the_file_away(state: StateDir) -> None:
    invoke("set", "model", "m", "--concurrency", "none")
    assert stored(state) == {"model:m": Bounds(concurrency=None)}
    assert invoke("get", "model", "m").stdout == "model m: concurrency none\n"


def test_the_default_and_keys(state: StateDir) -> None:
    key_id = made_key(state, tokens_per_minute=1000)
    invoke("set", "default", "--qps", "1")
    assert invoke("set", "key", key_id, "--qps", "7").stdout.startswith(
        f"key {key_id}: now qps 7, tokens_per_minute 1000"
    )
    assert stored(state) == {"default": Bounds(qps=1), f"key:{key_id}": Bounds(qps=7)}
    assert invoke("get", "default").stdout == "default: qps 1\n"


def test_a_dry_run_writes_nothing(state: StateDir) -> None:
    result = invoke("set", "user", "ann", "--qps", "5", "--dry-run")
    assert result.stdout == "user ann: would be qps 5 (before: qps 20, burst 40)\n"
    assert not (state.root / FILE).exists()
    invoke("set", "user", "ann", "--qps", "5")
    assert "would be qps 20" in invoke("unset", "user", "ann", "--dry-run").stdout
    assert stored(state) == {"user:ann": Bounds(qps=5)}


def test_json(state: StateDir) -> None:
    shown = json.loads(invoke("set", "user", "ann", "--qps", "5", "--json").stdout)
    assert shown == {
        "kind": "user",
        "name": "ann",
        "limits": {"qps": 5, "burst": None, "concurrency": None, "tokens_per_minute": None},
        "set": {"qps": 5},
        "dry_run": False,
    }
    everything = json.loads(invoke("get", "--json").stdout)
    assert [(row["kind"], row["name"]) for row in everything] == [
        ("default", None),
        ("user", "ann"),
        ("model", "m"),
    ]
    assert everything[0]["limits"]["burst"] == 40
    assert json.loads(invoke("get", "model", "free", "--json").stdout)["limits"]["qps"] is None


def test_the_table_names_everybody_with_limits(state: StateDir) -> None:
    key_id = made_key(state, qps=3)
    made_key(state)
    invoke("set", "user", "[red]ann", "--tokens-per-minute", "1000000")
    lines = [" ".join(line.split()) for line in invoke("get").stdout.splitlines()]
    assert lines == [
        "OF NAME QPS BURST CONCURRENCY TOKENS/MIN SET WHILE RUNNING",
        "default (all users) 20 40 - - -",
        "user [red]ann 20 40 - 1000000 tokens_per_minute 1000000",
        f"key {key_id} 3 - - - -",
        "model m - - 8 - -",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["user", "ann"], "what limit? give --qps, --burst, --concurrency or --tokens-per-minute"),
        (["user", "--qps", "1"], "which user? give its name"),
        (["default", "ann", "--qps", "1"], "default takes no name"),
        (["user", "ann", "--qps", "0"], "qps must be more than 0 and at most 1000000, not 0"),
        (["user", "ann", "--qps", "nan"], "qps must be more than 0"),
        (["user", "ann", "--qps", "many"], "'many' is no number; write one, or none"),
        (["user", "ann", "--burst", "1.5"], "'1.5' is no whole number"),
        (["user", "ann", "--burst", "5"], "burst has a meaning only beside qps; set qps too"),
        (["user", "ann", "--qps", "1", "--burst", "0"], "burst must be at least 1, not 0"),
        (["user", "ann", "--concurrency", "0"], "concurrency must be at least 1, not 0"),
        (["user", "ann", "--tokens-per-minute", "1000000000001"], "must be from 1 to 10^9"),
        (["user", "ann", "--qps", "0.001", "--burst", "99999"], "takes over 31 days to come back"),
        (["user", "a\nb", "--qps", "1"], "user must have 1 to 512 printable characters"),
        (["model", "nick", "--qps", "1"], "'nick' is an alias; limits are of the model: use m"),
        (["model", "other", "--qps", "1"], "the fleet has no model 'other'; it has m, free"),
        (["key", "ann", "--qps", "1"], "this is no id of a key"),
        (["key", "abcdefghij", "--qps", "1"], "there is no key abcdefghij in"),
        (["group", "x", "--qps", "1"], "'group' is not one of"),
    ],
)
def test_what_cant_be_set_says_why(state: StateDir, arguments: list[str], words: str) -> None:
    assert words in invoke("set", *arguments, code=2).stderr
    assert not (state.root / FILE).exists()


def test_before_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "once the fleet has been up" in invoke("get").stderr
    assert not (tmp_path / ".pagefleet").exists()
    invoke("set", "model", "anything", "--qps", "2", "--dry-run")
    assert not (tmp_path / ".pagefleet").exists()
    invoke("set", "model", "anything", "--qps", "2")
    assert invoke("get", "model", "anything").stdout == "model anything: qps 2\n"


def test_a_file_that_cant_be_used_is_no_traceback(state: StateDir) -> None:
    (state.root / FILE).write_text("{")
    for arguments in (["get"], ["set", "user", "ann", "--qps", "1"], ["unset", "user", "ann"]):
        assert "can't be read" in invoke(*arguments, code=1).stderr


def test_dead_keys_are_not_listed(state: StateDir) -> None:
    living, dead = made_key(state, qps=5), made_key(state, qps=6)
    with KeyStore(state.root / KEYS_FILE, write=True) as store:
        store.revoke([dead])
    listed = invoke("get").stdout
    assert living in listed
    assert dead not in listed


def test_limits_of_keys_that_have_ended_go(state: StateDir) -> None:
    """With the next command that ends keys or sets limits, whichever way they ended; nobody else's do."""
    revoked, expired, rotated, living = (made_key(state) for _ in range(4))
    for key_id in (revoked, expired, rotated, living, "elsewhere1"):
        OverridesFile(state.root / FILE).put(f"key:{key_id}", Bounds(qps=3))
    OverridesFile(state.root / FILE).put("user:ann", Bounds(qps=4))

    keys("revoke", revoked)
    assert stored(state).keys() == {
        "user:ann",
        *(f"key:{id}" for id in (expired, rotated, living, "elsewhere1")),
    }
    new = keys("rotate", rotated, "--grace", "0s").stdout.split("_")[1]
    assert stored(state).keys() == {"user:ann", *(f"key:{id}" for id in (expired, new, living, "elsewhere1"))}
    with KeyStore(state.root / KEYS_FILE, write=True) as store:
        store.rotate(expired, grace=0)  # as time does it, without a command
    assert expired not in invoke("get").stdout
    invoke("set", "user", "bob", "--qps", "1")
    assert stored(state).keys() == {
        *("user:ann", "user:bob"),
        *(f"key:{id}" for id in (new, living, "elsewhere1")),
    }
    # Taken away, and not just left out: so every gateway hears of it, through Redis too.
    assert OverridesFile(state.root / FILE).read()[f"key:{revoked}"].bounds == NOTHING
    assert "has ended" in invoke("set", "key", revoked, "--qps", "1", code=2).stderr
    assert invoke("get", "key", revoked).stdout == f"key {revoked}: -\n"


def test_a_key_is_revoked_though_limits_cant_be_read(state: StateDir) -> None:
    key_id = made_key(state)
    (state.root / FILE).write_text("{")
    result = keys("revoke", key_id)
    assert f"key {key_id} of ann: revoked at" in result.stdout
    assert "limits of keys that have ended stay for now" in result.stderr
