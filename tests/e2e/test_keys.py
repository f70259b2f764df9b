"""API keys and limits as an operator and the users of an SDK meet them: `pagefleet up` with mode keys,
`pagefleet keys`, `pagefleet limits`, a real worker."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keyed_fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EFFECTIVE = 0.5  # seconds within which a change must hold
LONG = 8000  # tokens: seconds, so that an answer isn't over before its client is seen to leave


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    limits = {"default": {"qps": 1000, "burst": 1000, "tokens_per_minute": 12_000}}
    running = Fleet(tmp_path_factory.mktemp("keys"), limits=limits)
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=60)


def test_a_key_from_its_making_to_its_end(fleet: Fleet) -> None:
    assert "authentication: API keys" in fleet.output
    with pytest.raises(openai.AuthenticationError, match="not valid"):
        fleet.ask("none")
    key = fleet.key("--model", "tiny")
    answer = fleet.ask(key)
    assert answer.usage.completion_tokens == 3
    assert fleet.ask(key, "nick").model == "tiny"
    revoked = fleet.run("keys", "revoke", key)
    assert revoked.exit_code == 0, revoked.stderr
    time.sleep(EFFECTIVE)
    with pytest.raises(openai.AuthenticationError, match="was revoked"):
        fleet.ask(key)


def test_a_key_for_another_model(fleet: Fleet) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' does not exist"):
        fleet.ask(fleet.key("--model", "nick"))


def test_chat_with_a_key(fleet: Fleet) -> None:
    question = ("chat", "tiny", "-p", "hi", "--max-tokens", "3")
    refused = fleet.run(*question)
    assert refused.exit_code == 1
    assert "An API key is needed" in refused.stderr
    assert "--api-key" in refused.stderr
    answered = fleet.run(*question, PAGEFLEET_API_KEY=fleet.key())
    assert answered.exit_code == 0, answered.stderr


def test_a_restarted_gateway_asks_as_well(fleet: Fleet) -> None:
    def gateway() -> Any:
        units = json.loads(fleet.run("status", "--json").stdout)["units"]
        return next(unit for unit in units if unit["slot"] == "gateway")

    key = fleet.key()
    first = gateway()
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 100
    while (now := gateway())["state"] != "ready" or now["generation"] == first["generation"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert fleet.ask(key).usage.completion_tokens == 3
    with pytest.raises(openai.AuthenticationError):
        fleet.ask("none")


# --- limits


def test_a_keys_limit_is_a_rate_limit_error(fleet: Fleet) -> None:
    key = fleet.key("--qps", "0.01", "--burst", "2")
    for _ in range(2):
        fleet.ask(key)
    with pytest.raises(openai.RateLimitError) as caught:
        fleet.ask(key)
    assert caught.value.code == "rate_limit_exceeded"
    assert "the key's limit of 0.01 requests a second (burst 2)" in str(caught.value)
    assert 60 <= int(caught.value.response.headers["retry-after"]) <= 100
    fleet.ask(fleet.key())  # another key of the same user


def test_the_sdk_waits_as_long_as_it_is_told(fleet: Fleet) -> None:
    key = fleet.key("--qps", "2", "--burst", "1")
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=5, timeout=100) as client:
        for _ in range(3):
            client.completions.create(model="tiny", prompt="hi", max_tokens=1)


def test_tokens_of_a_stream_that_its_client_left_are_what_was_generated(fleet: Fleet) -> None:
    user = f"carol{time.time_ns()}"
    created = fleet.run("keys", "create", "--user", user)
    headers = {"authorization": f"Bearer {created.stdout.strip()}"}
    body = {"model": "tiny", "prompt": "hi", "max_tokens": LONG, "ignore_eos": True}
    with httpx.Client(base_url=fleet.url, headers=headers, timeout=100) as client:

        def remaining() -> int:
            # Its own reservation of a prompt and one token, which is less than ten.
            answer = client.post("/v1/completions", json={**body, "max_tokens": 1})
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        began, before = time.monotonic(), remaining()
        generated = _generated(client)
        asked = time.monotonic()
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            reserved = int(stream.headers["x-ratelimit-remaining-tokens"])
            next(stream.iter_lines())
        assert reserved <= before - LONG + 200 * (time.monotonic() - began) + 10
        # 200 come back each second, and the questions cost a few: more than that is what wasn't generated.
        while remaining() <= reserved + 200 * (time.monotonic() - asked) + 10:
            assert time.monotonic() < asked + 60
            time.sleep(0.1)
        assert _generated(client) - generated < LONG


def _again_and_again(fleet: Fleet, key: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        fleet.ask(key)


def _generated(client: httpx.Client) -> int:
    page = client.get("/metrics/workers").text
    return int(float(re.findall(r"^pagefleet_generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)[0]))


def test_limits_are_set_while_the_fleet_runs(fleet: Fleet) -> None:
    created = fleet.run("keys", "create", "--user", "dave", "--json")
    key, key_id = json.loads(created.stdout)["key"], json.loads(created.stdout)["id"]
    fleet.ask(key)
    changed = fleet.run("limits", "set", "user", "dave", "--qps", "0.01", "--burst", "1")
    assert changed.stdout.startswith("user dave: now qps 0.01, burst 1, tokens_per_minute 12000 (before:")
    with pytest.raises(openai.RateLimitError):  # within a moment
        _again_and_again(fleet, key)
    shown = json.loads(fleet.run("limits", "get", "--json").stdout)
    assert {"user", "default"} <= {row["kind"] for row in shown}
    assert fleet.run("limits", "unset", "user", "dave").exit_code == 0
    assert fleet.run("limits", "set", "key", key_id, "--concurrency", "1").exit_code == 0
    deadline = time.monotonic() + 60
    while True:
        try:
            fleet.ask(key)
            break
        except openai.RateLimitError:
            assert time.monotonic() < deadline
    assert fleet.run("limits", "set", "model", "nick", "--qps", "1").exit_code == 2  # an alias


def test_nobodys_name_is_in_a_log_or_metric(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.url, timeout=100) as client:
        page = client.get("/metrics").text
    assert 'pagefleet_gateway_rate_limited_total{scope="key"}' in page
    for text in (page, *(path.read_text() for path in Path(fleet.state).rglob("*.log"))):
        assert "dave" not in text
        assert "carol" not in text


def test_no_key_is_written_anywhere(fleet: Fleet) -> None:
    key = fleet.key()
    fleet.ask(key)
    with pytest.raises(openai.AuthenticationError):
        fleet.ask(key[:-1] + "_")
    fleet.process.send_signal(signal.SIGINT)
    rest, _ = fleet.process.communicate(timeout=60)
    assert fleet.process.returncode == 0
    files = [path for path in fleet.state.rglob("*") if path.is_file()]
    assert {"gateway.log", "tiny-0.log", "keys.db"} <= {path.name for path in files}
    everything = b"".join(path.read_bytes() for path in files) + (fleet.output + rest).encode()
    assert b"auth: keys; 0 known" in everything
    assert key.rpartition("_")[2][:12].encode() not in everything
