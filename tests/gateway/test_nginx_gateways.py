"""nginx in front of real gateways: what passes, what doesn't, and whose word a user is."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.fleet.nginx import render
from tests.gateway.nginx_fleet import SECRET, fleet_of, raw_get
from tests.gateway.nginx_server import Nginx, free_port, standalone
from tests.gateway.rig import CHAT, Rig, one_worker, target, until


@contextlib.asynccontextmanager
async def before_gateway(folder: Path, user_id: Any = "drop", **gateway: Any) -> AsyncIterator[Any]:
    """A worker, a gateway and nginx; yields (rig, nginx, client of nginx)."""
    async with one_worker(folder, **gateway) as rig:
        nginx = Nginx(folder)
        fleet = fleet_of(folder, **gateway)
        upstream = (f"127.0.0.1:{rig.port}",)
        nginx.write(render(fleet, standalone(listen=nginx.listen, upstreams=upstream, user_id=user_id)))
        base = f"http://127.0.0.1:{nginx.port}"
        async with nginx.running(), httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
            yield rig, nginx, client


# --- what it accepts


def certificate(folder: Path) -> tuple[str, str]:
    """A certificate for localhost that signs itself, and its key, at a path that needs quotes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    place = folder / 'c; "1"'
    place.mkdir()
    pem = serialization.Encoding.PEM
    (place / "cert.pem").write_bytes(made.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (place / "key.pem").write_bytes(private)
    return str(place / "cert.pem"), str(place / "key.pem")


# --- in front of gateways


async def pieces_pass_at_once(rig: Rig, client: httpx.AsyncClient) -> None:
    """What a worker has sent is there while it waits with the rest."""
    fake = {"do": "sse", "chunks": 10, "gate_at": 3}
    async with client.stream("POST", CHAT, json={"model": "m", "stream": True, "fake": fake}) as answer:
        pieces, received = answer.aiter_raw(), b""
        while b"token 2 " not in received:
            received += await anext(pieces)
        assert b"token 3 " not in received
        rig.workers[0].gate.set()
        received += b"".join([piece async for piece in pieces])
    assert received.endswith(b"data: [DONE]\n\n")


@pytest.mark.nginx
async def test_streams_are_not_buffered(tmp_path: Path) -> None:
    async with before_gateway(tmp_path) as (rig, _, client):
        await pieces_pass_at_once(rig, client)


@pytest.mark.nginx
async def test_what_passes_and_what_does_not(tmp_path: Path) -> None:
    async with before_gateway(tmp_path, max_body=65536) as (rig, nginx, client):
        worker = rig.workers[0]
        envelope = len(json.dumps({"model": "m", "x": ""}))
        fits = json.dumps({"model": "m", "x": "x" * (65536 - envelope)})
        assert (await client.post(CHAT, content=fits)).status_code == 200
        too_large = await client.post(CHAT, content=fits + " ")
        assert too_large.status_code == 413
        assert too_large.json()["error"]["code"] == "request_too_large"
        for path in (
            "/metrics",
            "/metrics/workers",
            "/ready",
            "/version",
            "/admin/drain",
            "/internal/whoami",
        ):
            for form in (path, f"/v1/..{path}", f"/v1/%2e%2e{path}", f"/v1/..%2f{path[1:]}", f"/{path}"):
                answer = await raw_get(nginx.port, form)
                assert answer.startswith(b"HTTP/1.1 404"), form
                assert b'"route_not_found"' in answer
        assert (await client.get("/health")).status_code == 200
        sent = {"x-request-id": "mine.1", "authorization": f"Bearer {SECRET}"}
        answer = await client.post(f"{CHAT}?key={SECRET}", json={"model": "m", "x": SECRET}, headers=sent)
        assert answer.headers["x-request-id"] == "mine.1"
        assert worker.requests[-1].headers["x-request-id"] == "mine.1"
        await client.post(CHAT, json={"model": "m"}, headers={"x-request-id": 'a" b'})
        assert len(worker.requests[-1].headers["x-request-id"]) == 32
        await until(lambda: len(nginx.log()) > 30)
    text = (tmp_path / "access.log").read_text() + (tmp_path / "error.log").read_text()
    assert SECRET not in text
    served = [line for line in nginx.log() if line["target"] == "s.1"]
    assert {"id": "mine.1", "path": CHAT, "status": 200, "model": "m"}.items() <= served[-2].items()


@pytest.mark.nginx
@pytest.mark.parametrize("user_id", ["drop", "client"])
async def test_whose_word_a_user_is(user_id: str, tmp_path: Path) -> None:
    """Two users share a limit of one request where X-User-Id doesn't pass, else each has his own."""
    limits = {"default": {"qps": 0.01, "burst": 1}}
    auth = {"trusted_proxies": ["127.0.0.1"]}
    async with before_gateway(tmp_path, user_id, limits=limits, auth=auth) as (_, _, client):
        codes = []
        for user in ("ann", "bob"):
            headers = {"x-user-id": user, "forwarded": f"for={user}"}
            codes.append((await client.post(CHAT, json={"model": "m"}, headers=headers)).status_code)
        assert codes == ([200, 200] if user_id == "client" else [200, 429])


@pytest.mark.nginx
async def test_a_swap_through_the_gateway_leaves_nginx_alone(tmp_path: Path) -> None:
    async with before_gateway(tmp_path) as (rig, nginx, client):
        before = nginx.pids()
        rig.route(target(await rig.worker("new"), slot="t", generation=2))
        async with asyncio.timeout(60):
            while (await client.post(CHAT, json={"model": "m"})).json()["served_by"] != "new":
                await asyncio.sleep(0.05)
        assert nginx.pids() == before


@pytest.mark.nginx
async def test_an_instance_that_is_down(tmp_path: Path) -> None:
    """Requests go to the other; when all are down, the error has the form of all errors."""
    async with one_worker(tmp_path) as rig:
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path)
        gateways = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{rig.port}")
        nginx.write(render(fleet, standalone(listen=nginx.listen, upstreams=gateways)))
        base = f"http://127.0.0.1:{nginx.port}"
        async with nginx.running(), httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
            for _ in range(10):
                assert (await client.post(CHAT, json={"model": "m"})).status_code == 200
            nginx.write(render(fleet, standalone(listen=nginx.listen, upstreams=gateways[:1])))
            await nginx.reload()
            answer = await client.post(CHAT, json={"model": "m"})
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "bad_gateway"


@pytest.mark.nginx
async def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    async with one_worker(tmp_path) as rig:
        nginx = Nginx(tmp_path)
        options = standalone(
            listen=nginx.listen, upstreams=(f"127.0.0.1:{rig.port}",), certificate=cert, key=key
        )
        nginx.write(render(fleet_of(tmp_path), options))
        trust = ssl.create_default_context(cafile=cert)
        base = f"https://localhost:{nginx.port}"
        async with nginx.running(), httpx.AsyncClient(base_url=base, verify=trust, timeout=60) as client:
            assert (await client.post(CHAT, json={"model": "m"})).status_code == 200
            await pieces_pass_at_once(rig, client)
