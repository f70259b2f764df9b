"""Whose request it is: the key's user, or the one whom a trusted proxy names; nobody else is believed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.identity.proxies import peer_of
from gateway.identity.store import KeyStore
from gateway.targets import shares_of, sticky
from tests.gateway.auth_checks import bearer
from tests.gateway.rig import CHAT, Rig, error_of, target


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
