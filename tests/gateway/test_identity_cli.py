"""`pagefleet keys`: what it prints, where, and the codes it ends with."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.fleet.state import Routes, RoutesFile, write_routes
from gateway.identity.authenticator import with_keys
from gateway.identity.proxies import TrustedProxies
from gateway.identity.secret import KEY, new_key
from gateway.identity.store import KEYS_FILE


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".pagefleet"


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["keys", *arguments], prog_name="pagefleet")
    assert result.exit_code == code, result.output
    return result


def create(*arguments: str) -> tuple[str, str]:
    """(id, key)"""
    key = invoke("create", *arguments).stdout.strip()
    return key.split("_")[1], key


def listed(*arguments: str) -> list[dict]:
    return json.loads(invoke("list", "--json", *arguments).stdout)


def test_a_created_key_is_alone_on_stdout_and_works(state: Path) -> None:
    result = invoke("create", "--user", "alice", "--expires", "90d")
    key = result.stdout.removesuffix("\n")
    match = KEY.fullmatch(key.encode())
    assert match is not None
    key_id = match[1].decode()
    assert f"key {key_id} of alice in {state}, expires at 20" in result.stderr
    assert key.rpartition("_")[2] not in result.stderr
    assert stat.S_IMODE((state / KEYS_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    auth = with_keys(TrustedProxies(), state)
    assert auth.authenticate([(b"x-api-key", key.encode())], None).key_id == key_id
    auth.close()


def test_json(state: Path) -> None:
    options = ["--name", "n", "--model", "a", "--model", "b", "--priority", "high", "--qps", "0.5"]
    options += [
        "--burst",
        "3",
        "--concurrency",
        "4",
        "--tokens-per-minute",
        "1000",
        "--expires",
        "2999-01-31",
    ]
    limit = CliRunner().invoke(main, ["keys", "create", "--user", "alice", *options])
    assert limit.exit_code == 2  # over 100 years
    options[-1] = time.strftime("%Y-%m-%dT00:00:00Z", time.gmtime(time.time() + 30 * 86400))
    made = json.loads(invoke("create", "--user", "alice", *options, "--json").stdout)
    key = made.pop("key")
    assert KEY.fullmatch(key.encode())
    assert made["expires"] == pytest.approx(time.time() + 30 * 86400, abs=86400)
    assert made["expires"] % 86400 == 0
    assert {name: made[name] for name in ("user", "name", "models", "priority", "limits", "state")} == {
        "user": "alice",
        "name": "n",
        "models": ["a", "b"],
        "priority": "high",
        "limits": {"qps": 0.5, "burst": 3, "concurrency": 4, "tokens_per_minute": 1000},
        "state": "active",
    }
    assert listed() == [made]
    assert json.loads(invoke("show", made["id"], "--json").stdout) == made
    rotated = json.loads(invoke("rotate", made["id"], "--json").stdout)
    assert rotated.pop("old")["id"] == rotated["rotated_from"] == made["id"]
    assert rotated.pop("key") != key
    assert [record["id"] for record in listed()] == [made["id"], rotated["id"]]
    (revoked,) = json.loads(invoke("revoke", made["id"], "--json").stdout)
    assert revoked["state"] == "revoked"


def test_list_and_show_for_people(state: Path) -> None:
    assert "no keys in" in invoke("list").stdout
    assert not state.exists()
    one, key = create("--user", "alice", "--model", "m", "--qps", "5")
    two, _ = create("--user", "[red]bob", "--name", "ci")
    lines = invoke("list").stdout.splitlines()
    assert " ".join(lines[0].split()) == "ID USER NAME MODELS PRIORITY LIMITS CREATED EXPIRES STATE"
    assert [line.split()[:2] for line in lines[1:]] == [[one, "alice"], [two, "[red]bob"]]
    assert "qps 5" in lines[1]
    assert lines[2].split()[-2:] == ["never", "active"]
    shown = dict(line.split(maxsplit=1) for line in invoke("show", one).stdout.splitlines())
    assert (shown["models"], shown["limits"], shown["expires"], shown["name"]) == ("m", "qps 5", "-", "-")
    invoke("revoke", one, two)
    assert invoke("list").stdout == "no active key; --all shows 2 other ones\n"
    assert len(invoke("list", "--all").stdout.splitlines()) == 3
    for text in (invoke("list", "--all").output, invoke("show", one).output, json.dumps(listed("--all"))):
        assert key.rpartition("_")[2] not in text


def test_rotate_and_revoke(state: Path) -> None:
    old, _ = create("--user", "alice")
    result = invoke("rotate", old, "--grace", "1h")
    new = result.stdout.split("_")[1]
    assert f"the old key {old}: expires at" in result.stderr
    states = {record["id"]: record for record in listed()}
    assert states[old]["expires"] == pytest.approx(time.time() + 3600, abs=120)
    assert states[new]["expires"] is None
    assert f"successor is {new}" in invoke("rotate", old, code=2).stderr
    result = invoke("rotate", new, "--grace", "0s")
    assert f"the old key {new}: expired at" in result.stderr
    newest = result.stdout.split("_")[1]
    assert f"key {newest} of alice: revoked at" in invoke("revoke", newest).stdout
    assert f"key {newest} of alice: revoked at" in invoke("revoke", newest).stdout
    assert "was revoked at" in invoke("rotate", newest, code=2).stderr


def test_a_rotated_key_keeps_the_limits_that_were_set_for_it(state: Path) -> None:
    def limits(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["limits", *arguments], prog_name="pagefleet")
        assert result.exit_code == 0, result.output
        return result.stdout

    old, _ = create("--user", "alice", "--qps", "100")
    limits("set", "key", old, "--qps", "2", "--concurrency", "1")
    new = invoke("rotate", old).stdout.split("_")[1]
    assert limits("get", "key", new).replace(new, old) == limits("get", "key", old)
    assert "concurrency 1" in limits("get", "key", new)
    limits("unset", "key", new)
    plain = invoke("rotate", new).stdout.split("_")[1]
    assert "qps 100" in limits("get", "key", plain)
    # Where they can't be read, there is no key without them.
    limits("set", "key", plain, "--concurrency", "1")
    (state / "limits.json").write_text("no JSON")
    before = listed("--all")
    assert "can't be read" in invoke("rotate", plain, code=1).stderr
    assert listed("--all") == before


def test_a_whole_key_names_itself_and_is_not_repeated(state: Path) -> None:
    """Someone who found a key revokes it with what he has."""
    key_id, key = create("--user", "alice")
    result = invoke("revoke", key)
    assert f"key {key_id} of alice: revoked" in result.stdout
    unknown = new_key()[1]
    for sent, code in ((unknown, 2), (unknown[4:] + "-", 2), ("no id", 2), (key, 0)):
        output = invoke("revoke", sent, code=code).output
        assert sent.rpartition("_")[2] not in output.replace("no id of", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--user"),
        (["--user", " "], "user must have 1 to 512"),
        (["--user", "a", "--model", "not ok"], "'not ok' can't be the name"),
        (["--user", "a", "--qps", "0"], "--qps"),
        (["--user", "a", "--qps", "inf"], "--qps"),
        (["--user", "a", "--qps", "nan"], "qps"),
        (["--user", "a", "--burst", "0"], "--burst"),
        (["--user", "a", "--burst", "99999999999999999999"], "--burst"),
        (["--user", "a", "--priority", "urgent"], "--priority"),
        (["--user", "a", "--expires", "soon"], "--expires"),
        (["--user", "a", "--expires", "20270131"], "--expires"),
        (["--user", "a", "--expires", "2020-01-01"], "future"),
        (["--user", "a", "--expires", "0s"], "future"),
        (["--user", "a", "--expires", "999999d"], "100 years"),
    ],
)
def test_refused_creations_leave_nothing(state: Path, arguments: list[str], message: str) -> None:
    assert message in invoke("create", *arguments, code=2).stderr
    assert not state.exists()


def test_without_keys_or_with_another_file(state: Path) -> None:
    for command in ("show", "rotate", "revoke"):
        assert f"there are no keys in {state}" in invoke(command, "abcdefghij", code=2).stderr
    create("--user", "alice")
    for command in ("show", "rotate", "revoke"):
        assert "there is no key abcdefghij" in invoke(command, "abcdefghij", code=2).stderr
    assert "--grace" in invoke("rotate", "abcdefghij", "--grace", "x", code=2).stderr
    (state / KEYS_FILE).write_bytes(b"nonsense" * 1000)
    for arguments in (["list"], ["create", "--user", "a"], ["revoke", "abcdefghij"]):
        assert str(state / KEYS_FILE) in invoke(*arguments, code=1).stderr


def test_a_misspelt_model_is_told_of(state: Path) -> None:
    state.mkdir()
    routes = Routes(model="qwen2", epoch=1, aliases=("qwen",))
    write_routes(state / "routes.json", RoutesFile(epoch=1, models={"qwen2": routes}))
    result = invoke("create", "--user", "a", "--model", "qwen", "--model", "qwne2")
    assert "warning: the fleet has no model 'qwne2'; it has qwen2, qwen" in result.stderr
    assert "'qwen';" not in result.stderr


def test_another_fleet_by_directory_or_file(state: Path) -> None:
    fleet = state.parent / "fleet.yaml"
    fleet.write_text("supervisor: {state_dir: elsewhere}\nmodels:\n  - {name: a, source: o/n}\n")
    key_id, _ = create("--user", "alice", "--file", str(fleet))
    assert [record["id"] for record in listed("--state-dir", "elsewhere")] == [key_id]
    assert listed() == []
