"""Who may call: real gateways on a real store of keys, from the first header to what the worker sees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from contracts.errors import model_not_found
from gateway.cli import main as pagefleet
from gateway.identity import keyring
from gateway.identity.keyring import POLL_EVERY
from gateway.identity.proxies import peer_of
from gateway.identity.secret import new_key
from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.routes import native
from gateway.routes import openai as openai_routes
from gateway.targets import shares_of, sticky
from tests.gateway.rig import CHAT, Rig, error_of, http_post, one_worker, target, until

KEYS = {"auth": {"mode": "keys"}}
EFFECTIVE = 0.5  # seconds within which a change must hold
FAKES: tuple[dict[str, Any], ...] = (
    {},
    {"do": "reset"},
    {"do": "garbage"},
    {"do": "sse", "die_at": 2},
    {"do": "status", "status": 500},
)
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyStore]:
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        yield store


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def seen() -> None:
    """Until every gateway looks at the store again."""
    await asyncio.sleep(POLL_EVERY)


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


# --- processes


@contextlib.contextmanager
def processes(rig: Rig, count: int, auth: str = "{mode: keys}") -> Iterator[Callable[[], list[str]]]:
    """Gateways as processes of their own in the rig's folder, where they log; gives their addresses."""
    config = rig.folder / "fleet.yaml"
    config.write_text(f"gateway: {{port: 0, auth: {auth}}}\nmodels: [{{name: m, source: o/n}}]\n")
    command = [sys.executable, "-m", "gateway", "--config", str(config), "--state-dir", str(rig.folder)]
    children = []
    for number in range(count):
        with (rig.folder / f"gateway{number}.log").open("wb") as log:
            children.append(subprocess.Popen(command, stderr=log))

    def urls() -> list[str]:
        ports = re.findall(rb"serves on \('127.0.0.1', (\d+)\)", written(rig.folder, "*.log"))
        return [f"http://127.0.0.1:{port.decode()}" for port in ports]

    try:
        yield urls
    finally:
        for child in children:
            child.terminate()
        for child in children:
            assert child.wait(60) == 0


@contextlib.asynccontextmanager
async def clients_of(
    rig: Rig, count: int, auth: str = "{mode: keys}"
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One client for each of so many gateway processes."""
    with processes(rig, count, auth) as urls:
        await until(lambda: len(urls()) == count, 60)
        async with contextlib.AsyncExitStack() as stack:
            # They say their address just before they listen.
            transport = httpx.AsyncHTTPTransport(retries=5)
            await stack.enter_async_context(transport)
            clients = [httpx.AsyncClient(base_url=url, transport=transport, timeout=60) for url in urls()]
            for client in clients:
                assert (await client.get("/health")).status_code == 200
            yield clients


def move(source: Path, destination: Path) -> None:
    """The store with the files that belong to it, over what is there; the gateway never finds it in part."""
    for file in sorted(source.glob(f"{KEYS_FILE}*"), key=lambda file: file.name == KEYS_FILE):
        file.replace(destination / file.name)


def written(folder: Path, pattern: str) -> bytes:
    """All that is in files so named."""
    return b"".join(path.read_bytes() for path in folder.glob(pattern))


def keys(folder: Path, *arguments: str) -> str:
    """What ``pagefleet keys`` prints."""
    result = CliRunner().invoke(pagefleet, ["keys", *arguments, "--state-dir", str(folder)])
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


async def agree(clients: list[httpx.AsyncClient], key: str, status: int) -> None:
    """All gateways give this status within half a second."""
    changed = time.monotonic()
    while True:
        began = time.monotonic()
        answers = [(await client.get("/v1/models", headers=bearer(key))).status_code for client in clients]
        if set(answers) == {status}:
            return
        assert began - changed < EFFECTIVE, answers


async def test_two_processes_on_one_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    async with clients_of(rig, 2) as clients:
        await agree(clients, new_key()[1], 401)  # there is no store yet
        key = keys(tmp_path, "create", "--user", "alice", "--model", "m")
        await agree(clients, key, 200)
        successor = keys(tmp_path, "rotate", key, "--grace", "1h")
        await agree(clients, successor, 200)
        await agree(clients, key, 200)
        keys(tmp_path, "revoke", key)
        await agree(clients, key, 401)
        for client in clients:
            assert (
                await client.post(CHAT, json={"model": "m"}, headers=bearer(successor))
            ).status_code == 200
    await worker.stop()
    logs = written(tmp_path, "*.log").decode()
    assert logs.count("auth: keys") == 2
    assert "Traceback" not in logs
    for text in (key, successor):
        assert text.rpartition("_")[2] not in logs


async def test_without_keys_the_log_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    async with clients_of(rig, 1, "{mode: none}") as (client,):
        assert (await client.post(CHAT, json={"model": "m"})).status_code == 200
        assert (await client.post(CHAT, json={"model": "m"}, headers=bearer("sk-1"))).status_code == 200
    await worker.stop()
    assert "auth: none; whoever reaches this gateway may use it" in (tmp_path / "gateway0.log").read_text()


def test_keys_that_cannot_be_read_end_the_process(tmp_path: Path) -> None:
    """With code 1, after which the supervisor tries again: serving nobody in silence would be worse."""
    (tmp_path / KEYS_FILE).write_text("no keys in here" * 1000)
    config = tmp_path / "fleet.yaml"
    config.write_text("gateway: {port: 0, auth: {mode: keys}}\nmodels: [{name: m, source: o/n}]\n")
    command = [sys.executable, "-m", "gateway", "--config", str(config), "--state-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"the keys in {tmp_path / KEYS_FILE} can't be used" in ended.stderr
    assert "Traceback" not in ended.stderr


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


# --- users


class Split:
    """A rollout at one half, which shows whom a request counts for."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def worker(self, headers: dict[str, str], **body: Any) -> str:
        response = await self.rig.post({"model": "m", **body}, headers=headers)
        assert response.status_code == 200, response.text
        return str(response.json()["served_by"])

    def of(self, user: str) -> str:
        live = list(self.rig.app.router.table.entries["m"].live)
        return sticky(shares_of(live), "s", "m", user)[0].target.slot

    async def count_for(self, counted: str, headers: dict[str, str], **body: Any) -> bool:
        return await self.worker(headers, **body) == self.of(counted)


@contextlib.asynccontextmanager
async def split(folder: Path, **auth: Any) -> AsyncIterator[Split]:
    rig = Rig(folder, auth=auth)
    workers = [await rig.worker(name) for name in "ab"]
    rollout: dict[str, Any] = {"rollout_id": "r", "salt": "s"}
    rig.route(
        *(target(worker, slot=worker.name, weight_bp=5000, variant=worker.name) for worker in workers),
        **rollout,
    )
    async with rig.running():
        yield Split(rig)


USERS = [f"user{number}" for number in range(12)]  # chance passes them all once in 4096
ADDRESSES = [f"198.51.100.{number}" for number in range(12)]


async def test_with_keys_the_user_is_the_key_s(store: KeyStore, tmp_path: Path) -> None:
    made = {user: bearer(store.create(user)[1]) for user in USERS}
    async with split(tmp_path, mode="keys", trusted_proxies=["127.0.0.1"]) as rollout:
        for user, headers in made.items():
            assert await rollout.count_for(user, headers)
            for lie in USERS[:3]:
                sent = {**headers, "x-user-id": lie, "x-forwarded-for": lie}
                assert await rollout.count_for(user, sent, user=lie)


async def test_a_trusted_proxy_names_user_and_address(tmp_path: Path) -> None:
    async with split(tmp_path, trusted_proxies=["127.0.0.1", "10.0.0.0/8"]) as rollout:
        for user, address in zip(USERS, ADDRESSES, strict=True):
            assert await rollout.count_for(user, {"x-user-id": user}, user="somebody")
            assert await rollout.count_for(address, {"x-forwarded-for": f"1.2.3.4, {address}, 10.9.9.9"})
            assert await rollout.count_for("127.0.0.1", {"forwarded": f"for={address}"}, user=user)
        response = await rollout.rig.client.post(
            CHAT, json={"model": "m"}, headers=[("x-user-id", "a"), ("x-user-id", "b")]
        )
        assert (response.status_code, error_of(response)["code"]) == (400, "ambiguous_user")


async def test_the_other_header(tmp_path: Path) -> None:
    auth = {"trusted_proxies": ["127.0.0.1"], "forwarded_header": "forwarded"}
    async with split(tmp_path, **auth) as rollout:
        for address in ADDRESSES:
            assert await rollout.count_for(address, {"forwarded": f"for=1.2.3.4, for={address};proto=http"})
            assert await rollout.count_for("127.0.0.1", {"x-forwarded-for": address})


async def test_nobody_else_is_believed(tmp_path: Path) -> None:
    async with split(tmp_path, trusted_proxies=["10.0.0.0/8", "unix:"]) as rollout:
        for user, address in zip(USERS, ADDRESSES, strict=True):
            sent = {"x-user-id": user, "x-forwarded-for": address, "forwarded": f"for={address}"}
            assert await rollout.count_for("127.0.0.1", sent, user=user)


async def test_without_proxies_no_address_is_believed(tmp_path: Path) -> None:
    async with split(tmp_path) as rollout:
        for user, address in zip(USERS, ADDRESSES, strict=True):
            sent = {"x-forwarded-for": address, "forwarded": f"for={address}"}
            assert await rollout.count_for("127.0.0.1", sent)
            assert await rollout.count_for(user, sent, user=user)
            assert await rollout.count_for(user, {**sent, "x-user-id": user}, user="somebody")


NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy;
    fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            auth_basic "users"; auth_basic_user_file users;
            proxy_bind 127.0.0.2;
            proxy_pass http://127.0.0.1:{gateway};
            proxy_set_header X-User-Id $remote_user;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, gateway: int) -> Iterator[str]:
    """A real one that knows its users by password and reaches the gateway from 127.0.0.2; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "users").write_text("".join(f"{user}:{{PLAIN}}secret\n" for user in USERS))
    (folder / "nginx.conf").write_text(NGINX.format(port=port, gateway=gateway))
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.nginx
async def test_users_of_a_real_nginx(tmp_path: Path) -> None:
    """What a client says of itself counts neither through the proxy nor beside it."""
    lies = {"x-user-id": "root", "x-forwarded-for": "1.2.3.4"}
    async with split(tmp_path, trusted_proxies=["127.0.0.2"]) as rollout:
        with nginx(tmp_path, rollout.rig.port) as url:
            transport = httpx.AsyncHTTPTransport(retries=5)
            async with httpx.AsyncClient(base_url=url, transport=transport, timeout=60) as client:
                assert (await client.post(CHAT, json={"model": "m"}, headers=lies)).status_code == 401
                for user in USERS:
                    answer = await client.post(
                        CHAT, json={"model": "m", "user": "root"}, headers=lies, auth=(user, "secret")
                    )
                    assert answer.json()["served_by"] == rollout.of(user)
        for user in USERS:
            assert await rollout.count_for("127.0.0.1", {"x-user-id": user}, user=user)


def test_a_client_that_is_gone_is_no_unix_socket() -> None:
    assert peer_of({"client": ("192.0.2.1", 5), "server": ("127.0.0.1", 80)}) == ("192.0.2.1", 5)
    assert peer_of({"client": None, "server": ("/run/gateway.sock", None)}) is None
    assert peer_of({"client": None, "server": None}) is None
    assert peer_of({"client": None, "server": ("127.0.0.1", 80)}) == ("unknown", 0)
