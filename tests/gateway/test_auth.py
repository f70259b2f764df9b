"""Who may call: real gateways on a real store of keys, from the first header to what the worker sees."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from contracts.errors import model_not_found
from gateway.identity import keyring
from gateway.identity.secret import new_key
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.routes import native
from gateway.routes import openai as openai_routes
from tests.gateway.auth_checks import EFFECTIVE, KEYS, bearer, move, seen, written
from tests.gateway.rig import CHAT, Rig, error_of, http_post, one_worker, until

FAKES: tuple[dict[str, Any], ...] = (
    {},
    {"do": "reset"},
    {"do": "garbage"},
    {"do": "sse", "die_at": 2},
    {"do": "status", "status": 500},
)


MESSAGES: Any = [{"role": "user", "content": "hi"}]


def sdk(rig: Rig, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.port}/v1", api_key=key, max_retries=0)


# --- what the SDK raises


async def test_what_the_sdk_raises(store: KeyStore, tmp_path: Path) -> None:
    record, revoked = store.create("alice")
    old, expired = store.create("alice")
    store.revoke([record.id])
    store.rotate(old.id, grace=0)
    said = {revoked: "was revoked", expired: "expired at", new_key()[1]: "not valid", "sk-1": "not valid"}
    async with one_worker(tmp_path, **KEYS) as rig:
        for key, words in said.items():
            async with sdk(rig, key) as client:
                calls = (
                    client.chat.completions.create(model="m", messages=MESSAGES),
                    client.chat.completions.create(model="m", messages=MESSAGES, stream=True),
                    client.completions.create(model="none", prompt="hi"),
                    client.models.retrieve("m"),
                )
                for call in calls:
                    with pytest.raises(openai.AuthenticationError, match=words) as caught:
                        await call
                    assert caught.value.code == "invalid_api_key"
                    assert caught.value.response.headers["www-authenticate"].startswith("Bearer")
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
        assert not rig.workers[0].requests


async def test_forbidden_is_as_unknown(store: KeyStore, tmp_path: Path) -> None:
    _, key = store.create("alice", models=["idle"])
    async with one_worker(tmp_path, **KEYS) as rig, sdk(rig, key) as client:
        for name in ("m", "nick", "none"):
            calls = (
                client.chat.completions.create(model=name, messages=MESSAGES),
                client.models.retrieve(name),
            )
            for call in calls:
                with pytest.raises(openai.NotFoundError) as caught:
                    await call
                assert caught.value.response.json() == model_not_found(name).body()
                assert "x-pagefleet-model" not in caught.value.response.headers
        with pytest.raises(openai.InternalServerError, match="starting"):
            await client.chat.completions.create(model="idle", messages=MESSAGES)
        assert not rig.workers[0].requests
        # What was refused is no model's request.
        page = (await rig.client.get("/metrics")).text
        assert 'pagefleet_gateway_requests_total{model="",status="404",target=""} 3.0' in page
        assert 'model="m",status' not in page


# --- what needs a key, and what a key is


async def test_without_a_key_only_what_probes_ask_for(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **KEYS) as rig:
        for path in (*openai_routes.PROXIED, *native.PROXIED):
            response = await rig.post(path=path)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["x-request-id"]
        for path in ("/v1/models", "/v1/models/m", "/v1/models/none"):
            assert (await rig.client.get(path)).status_code == 401
            assert (await rig.client.head(path)).status_code == 401
        for path in ("/health", "/metrics", "/metrics/workers", "/version"):
            assert (await rig.client.get(path)).status_code == 200
        assert (await rig.client.get("/ready")).status_code == 503  # `idle` has no worker
        assert (await rig.client.options(CHAT)).status_code == 200
        assert not rig.workers[0].requests


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer KEY"},
        {"authorization": "bearer KEY"},
        {"x-api-key": "KEY"},
        {"authorization": "Basic dTpw", "x-api-key": "KEY"},
    ],
)
async def test_a_good_key(store: KeyStore, tmp_path: Path, headers: dict[str, str]) -> None:
    _, key = store.create("alice")
    async with one_worker(tmp_path, **KEYS) as rig:
        sent = {name: value.replace("KEY", key) for name, value in headers.items()}
        assert (await rig.post(headers=sent)).status_code == 200
        names = [card["id"] for card in (await rig.client.get("/v1/models", headers=sent)).json()["data"]]
        assert names == ["m", "nick", "idle"]


@pytest.mark.parametrize(
    ("models", "listed"),
    [(["m"], ["m", "nick"]), (["nick"], ["nick"]), (["idle", "gone"], ["idle"]), (["gone"], [])],
)
async def test_models_of_a_key(store: KeyStore, tmp_path: Path, models: list[str], listed: list[str]) -> None:
    headers = bearer(store.create("alice", models=models)[1])
    async with one_worker(tmp_path, **KEYS) as rig:
        data = (await rig.client.get("/v1/models", headers=headers)).json()["data"]
        assert [card["id"] for card in data] == listed
        for name in ("m", "nick", "idle"):
            found = await rig.client.get(f"/v1/models/{name}", headers=headers)
            assert found.status_code == (200 if name in listed else 404)
            asked = await rig.post({"model": name}, headers=headers)
            assert (asked.status_code == 404) == (name not in listed)
        by_query = await rig.client.post(f"{CHAT}?model=m", json={}, headers=headers)
        assert (by_query.status_code == 200) == ("m" in listed)


async def test_refused_before_the_body_is_read(tmp_path: Path) -> None:
    """60 MB are announced and never sent; the refusal comes all the same, and no invitation to send them."""
    async with one_worker(tmp_path, **KEYS) as rig:
        for extra in ("", "expect: 100-continue\r\n", "authorization: Bearer sk-1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{extra}content-length: 60000000\r\n\r\n"
            writer.write(head.encode())
            async with asyncio.timeout(60):
                answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close" in answer.lower()
            writer.close()
        assert b" 401 " in await rig.raw(http_post(b"{}"))


# --- changes while it runs


async def test_revoked_under_load(store: KeyStore, tmp_path: Path) -> None:
    """Every request that begins half a second after the command is refused; what runs goes on to its end."""
    record, key = store.create("alice")
    _, other = store.create("bob")
    answers: list[tuple[float, int]] = []  # when it began
    before: set[int] = set()
    others: list[int] = []
    stop = asyncio.Event()

    async def hammer(rig: Rig) -> None:
        while not stop.is_set():
            began = time.monotonic()
            answers.append((began, (await rig.post(headers=bearer(key))).status_code))
            others.append((await rig.post(headers=bearer(other))).status_code)

    async with one_worker(tmp_path, **KEYS) as rig, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(hammer(rig))
        stream = {"model": "m", "stream": True, "fake": {"do": "sse", "gate_at": 1}}
        running = group.create_task(rig.post(stream, headers=bearer(key)))
        await until(lambda: len(answers) > 50 and any(b"sse" in r.body for r in rig.workers[0].requests))
        before.update(status for _, status in answers)
        store.revoke([record.id])
        revoked = time.monotonic()
        await asyncio.sleep(2 * EFFECTIVE)
        await until(lambda: answers[-1][0] > revoked + EFFECTIVE)
        stop.set()
        rig.workers[0].gate.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
    assert before == {200}
    assert {status for began, status in answers if began > revoked + EFFECTIVE} == {401}
    assert set(others) == {200}


async def test_rotation_with_grace(store: KeyStore, tmp_path: Path) -> None:
    record, old = store.create("alice", models=["m"])
    async with one_worker(tmp_path, **KEYS) as rig:
        _, successor, new = store.rotate(record.id, grace=3600)
        await seen()
        for key in (old, new):
            assert (await rig.post(headers=bearer(key))).status_code == 200
            assert (await rig.post({"model": "idle"}, headers=bearer(key))).status_code == 404
        store.revoke([record.id])
        ending, _, newest = store.rotate(successor.id, grace=1)
        await seen()
        assert (await rig.post(headers=bearer(old))).status_code == 401
        assert (await rig.post(headers=bearer(newest))).status_code == 200
        assert ending.expires is not None
        await asyncio.sleep(max(0.0, ending.expires - time.time()))
        refused = await rig.post(headers=bearer(new))
        assert refused.status_code == 401
        assert f"{ending.id} expired" in error_of(refused)["message"]
        assert (await rig.post(headers=bearer(newest))).status_code == 200


async def test_keys_that_cannot_be_read_for_long(
    store: KeyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A while they go on as they are known; then nobody gets in, until they can be read again."""
    monkeypatch.setattr(keyring, "UNREADABLE_LIMIT", 1.0)
    _, key = store.create("alice")
    _, listed = store.create("bob")
    path, kept = tmp_path / KEYS_FILE, tmp_path / "kept"
    kept.mkdir()
    async with one_worker(tmp_path, **KEYS) as rig:
        move(tmp_path, kept)
        path.write_bytes(b"no keys in here" * 1000)
        await seen()
        began = time.monotonic()
        statuses = {200}
        while statuses == {200}:
            statuses = {(await rig.post(headers=bearer(good))).status_code for good in (key, listed)}
            assert time.monotonic() - began < 60
        assert time.monotonic() - began > 0.9
        refused = await rig.post(headers=bearer(key))
        assert (refused.status_code, error_of(refused)["code"]) == (503, "keys_unavailable")
        assert refused.headers["retry-after"] == "5"
        assert (await rig.client.get("/v1/models", headers=bearer(key))).status_code == 503
        assert (await rig.post(headers=bearer("sk-1"))).status_code == 401
        assert (await rig.client.get("/health")).status_code == 200
        move(kept, tmp_path)
        await seen()
        assert (await rig.post(headers=bearer(key))).status_code == 200


# --- secrets


async def test_no_key_in_logs_metrics_answers_or_at_the_worker(
    store: KeyStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpcore").setLevel(logging.WARNING)  # the client's own log has what it sends
    record, revoked = store.create("alice")
    store.revoke([record.id])
    good, unknown = store.create("bob", models=["m", "idle"])[1], new_key()[1]
    texts: list[str] = []
    async with one_worker(tmp_path, **KEYS) as rig:
        for key in (good, unknown, revoked):
            for headers in (bearer(key), {"x-api-key": key}, {**bearer(key), "cookie": f"key={key}"}):
                for fake in FAKES:
                    answer = await rig.post({"model": "m", "stream": True, "fake": fake}, headers=headers)
                    texts += [answer.text, str(answer.headers)]
                for name in ("idle", "none"):
                    texts.append((await rig.post({"model": name}, headers=headers)).text)
                texts.append((await rig.client.get("/v1/models", headers=headers)).text)
                texts.append((await rig.client.post(CHAT, content=b"{", headers=headers)).text)
        for path in ("/metrics", "/metrics/workers"):
            texts.append((await rig.client.get(path, headers=bearer(good))).text)
        texts += [repr((seen.path, seen.headers, seen.body)) for seen in rig.workers[0].requests]
        assert len(rig.workers[0].requests) >= 15
    texts.append(caplog.text)
    assert "alice" not in texts[-1] + texts[-2]
    everything = "\n".join(texts).encode() + written(tmp_path, "*.json") + written(tmp_path, f"{KEYS_FILE}*")
    for key in (good, unknown, revoked):
        assert key.rpartition("_")[2][:12].encode() not in everything
