"""nginx's configuration, tried with a real nginx in front of a real gateway and of fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cli.nginx import nginx as nginx_command
from gateway.config import FleetFile, load_fleet
from gateway.fleet.errors import InvalidFleet
from gateway.fleet.nginx import NginxError, NginxOptions, check_with_nginx, render, warnings
from gateway.fleet.nginx_values import word
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from tests.gateway.nginx_server import Nginx, free_port, standalone
from tests.gateway.rig import CHAT, Rig, one_worker, target, until

SECRET = "marmalade-7319"


def fleet_file(folder: Path, *names: str, **gateway: Any) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    content = {
        "gateway": {"port": 8123, "usage": False, **gateway},
        "supervisor": {"state_dir": str(folder / "state")},
        "models": [{"name": name, "source": "./model"} for name in names or ("m",)],
    }
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def fleet_of(folder: Path, *names: str, **gateway: Any) -> FleetFile:
    return load_fleet(fleet_file(folder, *names, **gateway))


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


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "instances": {"upstreams": ("127.0.0.1:8001", "http://[::1]:8002", "unix:/run/a gateway.sock")},
    "addresses": {"listen": ("127.0.0.1:18080", "unix:nginx.sock")},
    "names": {"server_names": ("llm.example.org", "*.example.org")},
    "monitoring": {"monitoring": ("10.0.0.0/8", "::1")},
    "user": {"user_id": "client", "max_fails": 0, "fail_timeout": 1},
    "passwords": {"htpasswd": "/etc/a; b"},
    "path": {"per_model": "path"},
    "port": {"per_model": "port", "first_port": 19001},
}
NAMES = ("m", "M", "org/m", "org-m", "a:b@c+d", "m.x", "n" * 120)


def targets(*weights: int, state: Any = "ready") -> tuple[Target, ...]:
    return tuple(
        Target(slot=f"s-{i}", generation=1, address=f"unix:/run/s {i}.sock", weight_bp=weight, state=state)
        for i, weight in enumerate(weights)
    )


@pytest.mark.nginx
@pytest.mark.parametrize("form", FORMS)
def test_a_real_nginx_takes_every_form(form: str, tmp_path: Path) -> None:
    options = FORMS[form]
    if form == "addresses":
        options = {"listen": ("127.0.0.1:18080", f"unix:{tmp_path}/n.sock")}
    models = {"m": Routes(model="m", epoch=1, targets=targets(9_500, 500, 0)),
              "M": Routes(model="M", epoch=1, targets=targets(10_000, state="down"))}  # fmt: skip
    fleet = fleet_of(tmp_path, *NAMES, auth={"forwarded_header": "forwarded"}, timeouts={"idle": "1.5s"})
    text = render(fleet, standalone(**options), RoutesFile(epoch=1, models=models))
    assert "successful" in check_with_nginx(text)
    if form in ("path", "port"):
        assert "weight=19" in text
        assert '"unix:/run/s 2.sock" max_fails=3 fail_timeout=10s down' in text
        assert "weight=0" not in text
    else:
        assert ("least_conn" in text) == (form == "instances")


@pytest.mark.nginx
def test_what_nginx_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    options = standalone(certificate=f"{tmp_path}/none.pem", key=f"{tmp_path}/none.key", listen=("18443",))
    with pytest.raises(NginxError, match=r"none\.pem"):
        check_with_nginx(render(fleet_of(tmp_path), options))


@pytest.mark.parametrize(
    ("options", "gateway", "words"),
    [
        ({"certificate": "/c"}, {}, "--tls-key"),
        ({"listen": ("80; }",)}, {}, "--listen"),
        ({"listen": ("70000",)}, {}, "--listen"),
        ({"upstreams": ("http://a/b",)}, {}, "no address"),
        ({"upstreams": ("unix:" + "/x" * 60,)}, {}, "107"),
        ({"monitoring": ("10.0.0.1/8",)}, {}, "--monitoring"),
        ({"server_names": ("a$b",)}, {}, "dollar"),
        ({"access_log": "/a\nb"}, {}, "line breaks"),
        ({}, {"port": 0}, "--upstream"),
        ({"per_model": "path"}, {"auth": {"mode": "keys"}}, "leads past the gateway"),
        ({"per_model": "port", "first_port": 65535}, {}, "--first-port"),
        ({"htpasswd": "/u"}, {"auth": {"mode": "keys"}}, "--htpasswd"),
    ],
)
def test_what_can_not_be(options: Any, gateway: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidFleet, match=words):
        render(fleet_of(tmp_path, "m", "n", **gateway), NginxOptions(**options))


@given(st.text(max_size=40))
@settings(max_examples=150)
def test_a_value_stays_one_word(text: str) -> None:
    """What nginx's own reader makes of it is the text."""
    try:
        quoted = word(text)
    except InvalidFleet:
        assert "$" in text or not text.isprintable()
        return
    if not quoted.startswith('"'):
        assert quoted == text
        assert not set(text) & set(" ;{}'\"\\#$")
        return
    inside = quoted[1:-1]
    read, escaped = "", False
    for char in inside:
        if not escaped and char == "\\":
            escaped = True
            continue
        assert escaped or char != '"', "the quotes end inside"
        read, escaped = read + char, False
    assert not escaped
    assert read == text


def test_warnings(tmp_path: Path) -> None:
    def lines(auth: Any, **options: Any) -> str:
        return "\n".join(warnings(fleet_of(tmp_path, auth=auth), NginxOptions(**options)))

    assert "127.0.0.1 to gateway.auth.trusted_proxies" in lines({})
    assert "add unix: to" in lines({}, upstreams=("unix:/g.sock",))
    assert lines({"trusted_proxies": ["127.0.0.0/8"]}) == ""
    assert lines({"mode": "keys"}) == ""
    assert "in the clear" in lines({"mode": "keys"}, listen=("0.0.0.0:80",))
    assert "past the gateway" in lines({}, per_model="path")


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


async def raw_get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


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


# --- a path or port for each model


class Upstream(asyncio.Protocol):
    """Answers each request with its name; keeps the heads it saw."""

    def __init__(self, name: bytes, heads: list[bytes]) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(name), name)
        self.heads = heads
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        *heads, self.data = (self.data + data).split(b"\r\n\r\n")
        self.heads += heads
        self.transport.write(self.answer * len(heads))


@contextlib.asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[tuple[list[Target], list[bytes]]]:
    loop, heads, servers, found = asyncio.get_running_loop(), [], [], []
    for name in ("primary", "standby"):
        path = f"{folder}/{name}.sock"
        servers.append(await loop.create_unix_server(lambda name=name: Upstream(name.encode(), heads), path))
        found.append(Target(slot=name, generation=1, address=f"unix:{path}", state="ready"))
    yield found, heads
    for server in servers:
        server.close()


def split(targets: list[Target], *weights: int) -> RoutesFile:
    import msgspec

    made = tuple(msgspec.structs.replace(t, weight_bp=w) for t, w in zip(targets, weights, strict=True))
    return RoutesFile(epoch=1, models={"org/m": Routes(model="org/m", epoch=1, targets=made)})


async def ask(port: int, count: int, path: bytes) -> Counter[str]:
    """`count` requests on one connection, 50 at a time; who answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers: Counter[str] = Counter()
    request = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path
    for _ in range(count // 50):
        writer.write(request * 50)
        for _ in range(50):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 200"), head
            answers[(await reader.readexactly(7)).decode()] += 1
    writer.close()
    return answers


@pytest.mark.nginx
async def test_weights_are_honoured(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (workers, heads):
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path, "org/m")
        options = standalone(listen=nginx.listen, per_model="path")
        path = b"/models/org-m/v1/models"
        for weights in ((9_300, 700), (10_000, 0)):
            nginx.write(
                render(fleet, options, split(workers, *weights)).replace(
                    "worker_processes auto", "worker_processes 2"
                )
            )
            async with nginx.running():
                parts = await asyncio.gather(*(ask(nginx.port, 1_000, path) for _ in range(10)))
            shares = sum(parts, Counter())
            assert shares.total() == 10_000
            assert abs(shares["standby"] - weights[1]) <= 100, shares
    assert {head.split(b" ")[1] for head in heads} == {b"/v1/models"}


@pytest.mark.nginx
async def test_only_what_is_listed_reaches_a_worker(tmp_path: Path) -> None:
    """No administration, and none of the headers that workers believe from this machine."""
    async with two_workers(tmp_path) as (workers, heads):
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path, "org/m", "other")
        options = standalone(listen=nginx.listen, per_model="path")
        nginx.write(render(fleet, options, split(workers, 10_000, 0)))
        base = f"http://127.0.0.1:{nginx.port}/models/"
        headers = {"authorization": SECRET, "x-pagefleet-priority": "high", "x-pagefleet-usage": "u",
                   "x-forwarded-for": "::1", "cookie": SECRET, "accept": "text/event-stream"}  # fmt: skip
        async with nginx.running(), httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
            assert (await client.get("org-m/v1/models/a%2fb", headers=headers)).text == "primary"
            for path in (
                "admin/drain",
                "v1/../admin/drain",
                "v1/%2e%2e/metrics",
                "internal/whoami",
                "v1",
                "",
            ):
                answer = await raw_get(nginx.port, f"/models/org-m/{path}")
                assert answer.startswith(b"HTTP/1.1 404"), path
            none = await client.post("other/v1/chat/completions", json={})
            assert none.status_code == 503
            assert none.json()["error"]["code"] == "model_unavailable"
            assert none.headers["retry-after"] == "5"
        (head,) = heads
        assert b"text/event-stream" in head
        assert SECRET.encode() not in head
        assert b"pagefleet" not in head.lower().replace(b"host: pagefleet_model_0", b"")
        assert b"forwarded" not in head.lower()


@pytest.mark.nginx
async def test_a_reload_loses_no_request(tmp_path: Path) -> None:
    """Weights move to the standby in five reloads under load. A connection that nginx ended while idle is
    opened again, as every HTTP client does for requests that may be repeated; no answer is an error."""
    async with two_workers(tmp_path) as (workers, _):
        nginx, fleet = Nginx(tmp_path), fleet_of(tmp_path, "org/m")
        options = standalone(listen=nginx.listen, per_model="path")
        nginx.write(render(fleet, options, split(workers, 10_000, 0)))
        answers: Counter[str] = Counter()
        done = asyncio.Event()
        moved = False

        async def load() -> None:
            transport = httpx.AsyncHTTPTransport(retries=0)
            base = f"http://127.0.0.1:{nginx.port}/models/org-m"
            async with httpx.AsyncClient(base_url=base, timeout=60, transport=transport) as client:
                while not done.is_set():
                    asked = moved
                    try:
                        answer = await client.get("/v1/models")
                    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                        answer = await client.get("/v1/models")
                        answers["repeated"] += 1
                    assert answer.status_code == 200
                    answers[answer.text] += asked

        async with nginx.running():
            tasks = [asyncio.create_task(load()) for _ in range(4)]
            for weight in (2_000, 4_000, 6_000, 8_000, 10_000):
                await asyncio.sleep(0.2)
                nginx.write(render(fleet, options, split(workers, 10_000 - weight, weight)))
                await nginx.reload()
            moved = True
            await until(lambda: answers["standby"] > 50)
            done.set()
            await asyncio.gather(*tasks)
    assert answers["primary"] == 0
    assert answers["repeated"] <= 4 * 5


# --- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(nginx_command, ["render", *words])


def test_the_file_is_written_as_a_whole(tmp_path: Path) -> None:
    fleet, out = str(fleet_file(tmp_path)), tmp_path / "pagefleet.conf"
    assert "would change" in run(fleet, "--out", str(out), "--dry-run").stdout
    assert not out.exists()
    assert "written" in run(fleet, "--out", str(out)).stdout
    assert "is as it should be" in run(fleet, "--out", str(out)).stdout
    assert run(fleet).stdout == out.read_text()
    assert json.loads(run(fleet, "--json").stdout)["config"] == out.read_text()
    assert not list(tmp_path.glob(".pagefleet*"))
    assert run(fleet, "--out", str(tmp_path / "none" / "x")).exit_code == 1


@pytest.mark.nginx
def test_what_nginx_refuses_is_not_written(tmp_path: Path) -> None:
    fleet, out = str(fleet_file(tmp_path)), tmp_path / "pagefleet.conf"
    assert run(fleet, "--test", "--out", str(out)).exit_code == 0
    before = out.read_text()
    refused = run(
        fleet, "--test", "--out", str(out), "--tls-cert", "/none", "--tls-key", "/none", "--listen", "8443"
    )
    assert refused.exit_code == 1
    assert "/none" in refused.stderr
    assert out.read_text() == before


@pytest.mark.nginx
def test_per_model_takes_the_routes_document(tmp_path: Path) -> None:
    fleet = str(fleet_file(tmp_path, "m", "n"))
    absent = run(fleet, "--per-model")
    assert absent.exit_code == 2
    assert "start the fleet first" in absent.stderr
    (tmp_path / "state").mkdir()
    documents = {"m": Routes(model="m", epoch=1, targets=targets(5_000, 5_000))}
    write_routes(tmp_path / "state" / "routes.json", RoutesFile(epoch=1, models=documents))
    for form in ("path", "port"):
        done = run(fleet, "--per-model", form, "--test", "--standalone")
        assert done.exit_code == 0, done.stderr
        assert done.stdout.count('server "unix:/run/s') == 2
    (tmp_path / "state" / "routes.json").write_text("{")
    assert run(fleet, "--per-model").exit_code == 2


def test_torch_and_jinja_are_not_loaded_at_start() -> None:
    import subprocess

    code = "import sys, gateway.cli.nginx; sys.exit('torch' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
