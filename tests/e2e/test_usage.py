"""Usage and audit as an operator meets them: a real fleet with keys and tokens, generation and files."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.keyed_fleet import Fleet
from tests.gateway.oidc_issuer import AUDIENCE, Issuer, rsa

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECRET = "xylophone-7319-marmalade"  # what prompts hold and nothing else may
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> Iterator[Fleet]:
    auth = {"mode": "oidc", "issuer": issuer.url, "audience": AUDIENCE}
    settings = {"auth": auth, "audit": {"file": "logs/audit.jsonl"}, "processes": 2}
    running = Fleet(tmp_path_factory.mktemp("usage"), **settings)
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=60)


@pytest.fixture
def client(fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.url, timeout=60, trust_env=False) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"Tell me of the {SECRET}", "ignore_eos": True, **fields}


def bearer(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


def usage_of(fleet: Fleet, *options: str) -> list[dict[str, Any]]:
    if not (fleet.state / "usage.db").exists():  # nothing was used yet
        return []
    found: list[dict[str, Any]] = json.loads(fleet.tell("usage", "--json", *options))
    return found


def audit_of(fleet: Fleet, *options: str) -> list[dict[str, Any]]:
    shown = fleet.tell("audit", "tail", "--json", "-n", "1000", *options)
    return [json.loads(line) for line in shown.splitlines()]


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def counted(client: httpx.Client, name: str) -> int:
    """The worker's own counter."""
    page = client.get("/metrics/workers").text
    return sum(int(float(value)) for value in re.findall(rf"^pagefleet_{name}_total{{.*}} (.*)$", page, re.M))


def test_tokens_are_those_that_the_worker_counted(fleet: Fleet, client: httpx.Client, issuer: Issuer) -> None:
    """Whole answers, streams without include_usage, clients that leave: all to the token."""
    key, token = fleet.key(), issuer.token(sub="bob")
    prompt, generated = counted(client, "prompt_tokens"), counted(client, "generation_tokens")
    whole = client.post(COMPLETIONS, json=body(max_tokens=7), headers=bearer(key))
    assert whole.status_code == 200
    streamed = client.post(COMPLETIONS, json=body(max_tokens=9, stream=True), headers=bearer(key))
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert '"usage":{' not in streamed.text
    several = client.post(COMPLETIONS, json=body(max_tokens=5, n=3), headers=bearer(token))
    assert several.json()["usage"]["completion_tokens"] == 15
    with client.stream(  # for seconds, so that it isn't over before its client is seen to leave
        "POST", COMPLETIONS, json=body(max_tokens=8000, stream=True), headers=bearer(token)
    ) as left:
        next(left.iter_raw())
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            COMPLETIONS,
            json=body(max_tokens=8000),
            headers=bearer(token),
            timeout=httpx.Timeout(60, read=0.05),
        )
    refused = client.post(COMPLETIONS, json=body(max_tokens=10**6), headers=bearer(token))
    assert refused.status_code == 400

    until(lambda: sum(row["requests"] for row in usage_of(fleet)) == 6)
    rows = {(row["user"], row["model"]): row for row in usage_of(fleet)}
    assert rows["alice", "tiny"]["requests"] == 2
    assert rows["alice", "tiny"]["completion_tokens"] == 7 + 9
    assert rows["bob", "tiny"]["requests"] == 4
    assert rows["bob", "tiny"]["failed"] == 3
    total = usage_of(fleet, "--by", "model")[0]
    again = 2 * several.json()["usage"]["prompt_tokens"]  # the worker counts it for each of three answers
    assert total["prompt_tokens"] == counted(client, "prompt_tokens") - prompt - again
    assert total["completion_tokens"] == counted(client, "generation_tokens") - generated
    assert [row["key"] != "" for row in usage_of(fleet, "--by", "key", "--user", "alice")] == [True]

    lines = {line["request_id"]: line for line in audit_of(fleet)}
    line = lines[whole.headers["x-request-id"]]
    assert (line["user"], line["model"], line["target"]) == ("alice", "tiny", "tiny-0.1")
    assert (line["completion_tokens"], line["finish_reason"], line["status"]) == (7, "length", 200)
    assert line["key_id"] == key.split("_")[1]
    line = lines[streamed.headers["x-request-id"]]
    assert line["completion_tokens"] == 9
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    line = lines[left.headers["x-request-id"]]
    assert (line["user"], line["status"], line["finish_reason"]) == ("bob", 499, "abort")
    assert 1 <= line["completion_tokens"] < 8000
    assert "key_id" not in line


def test_processes_of_a_gateway_write_the_same_files(fleet: Fleet, issuer: Issuer) -> None:
    """Each new connection may go to the other one; the beginning of a request's id is its process's."""
    headers, ids = bearer(issuer.token(sub="carol")), set()
    deadline = time.monotonic() + 60
    with contextlib.ExitStack() as stack:
        while len(ids) < 20 or len({name.rpartition("-")[0] for name in ids}) < 2:
            assert time.monotonic() < deadline
            # Its connection stays, so that the next goes to the other process.
            held = stack.enter_context(httpx.Client(trust_env=False, timeout=60, headers=headers))
            answer = held.post(fleet.url + COMPLETIONS, json=body(max_tokens=1))
            assert answer.status_code == 200
            ids.add(answer.headers["x-request-id"])
    until(lambda: sum(row["requests"] for row in usage_of(fleet, "--user", "carol")) == len(ids))
    assert usage_of(fleet, "--user", "carol")[0]["completion_tokens"] == len(ids)
    assert {line["request_id"] for line in audit_of(fleet, "--user", "carol")} == ids


def test_refusals_are_written_down(fleet: Fleet, client: httpx.Client, issuer: Issuer) -> None:
    key = fleet.key("--model", "tiny", "--qps", "0.001", "--burst", "1")
    asked = [
        (bearer("pfk_nonsense"), body(), 401, "invalid_api_key"),
        (bearer(issuer.token(rsa("other"))), body(), 401, "invalid_token"),
        (bearer(key), body(model="none"), 404, "model_not_found"),
        (bearer(key), body(max_tokens=1), 200, None),
        (bearer(key), body(max_tokens=1), 429, "rate_limit_exceeded"),
    ]
    ids = []
    for headers, sent, status, _ in asked:
        answer = client.post(COMPLETIONS, json=sent, headers=headers)
        assert answer.status_code == status, answer.text
        ids.append(answer.headers["x-request-id"])
    until(lambda: set(ids) <= {line["request_id"] for line in audit_of(fleet)})
    lines = {line["request_id"]: line for line in audit_of(fleet)}
    assert [(lines[i]["status"], lines[i].get("code")) for i in ids] == [(s, c) for *_, s, c in asked]
    assert ["user" in lines[i] for i in ids] == [False, False, True, True, True]
    assert [line["request_id"] for line in audit_of(fleet, "--status", "429")] == [ids[-1]]


def test_nothing_secret_is_written_anywhere(fleet: Fleet, client: httpx.Client, issuer: Issuer) -> None:
    """After all kinds of trouble, an orderly stop; then everything that the fleet wrote is searched."""
    key, token, expired = fleet.key(), issuer.token(), issuer.token(exp=1)
    answers = []
    for credential in (key, token, key[:-1] + "_", token[:-9] + "AAAAAAAAA", expired, SECRET):
        for sent in (
            json.dumps(body(max_tokens=2, user=SECRET)),
            json.dumps(body(prompt=[SECRET])),
            json.dumps({"model": "tiny", "messages": [{"role": "user", "content": SECRET, "name": 7}]}),
            json.dumps({"model": "tiny", "prompt": {SECRET: 1}}),
            f'{{"model": "tiny", "prompt": "{SECRET}',
            f'{{"model": {{"{SECRET}": 1}}}}',
        ):
            for path in (COMPLETIONS, "/v1/chat/completions", "/generate_stream", "/tokenize"):
                answer = client.post(path, content=sent, headers=bearer(credential))
                if answer.status_code >= 400:
                    answers.append(answer.text + str(answer.headers))
    ended = client.post(COMPLETIONS, json=body(max_tokens=3), headers=bearer(key)).headers["x-request-id"]
    metrics = client.get("/metrics").text + client.get("/metrics/workers").text
    fleet.process.send_signal(signal.SIGINT)
    rest, _ = fleet.process.communicate(timeout=60)
    assert fleet.process.returncode == 0
    assert ended in {line["request_id"] for line in audit_of(fleet)}  # nothing is lost at an orderly stop

    with sqlite3.connect(fleet.state / "usage.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    files = [path for path in fleet.directory.rglob("*") if path.is_file() and path.parent.name != "model"]
    names = {path.name for path in files}
    assert {
        "gateway0.log",
        "gateway1.log",
        "tiny-0.log",
        "keys.db",
        "usage.db",
        "audit.jsonl",
        "fleet.json",
    } <= names
    written = b"".join(path.read_bytes() for path in files)
    everything = written + (fleet.output + rest + metrics + "".join(answers)).encode()
    assert b"alice" in everything
    secrets = [SECRET, key.rpartition("_")[2][:12], *token.split(".")[1:], *expired.split(".")[1:]]
    for secret in secrets:
        place = everything.find(secret.encode())
        assert place < 0, everything[max(0, place - 200) : place + 100]
