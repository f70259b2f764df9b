"""The ways to a worker that bench/gateway_overhead.py compares, and how each is started.

Peers from the package index live in an environment of their own beside the project's, made when it is first
needed. Everything listens on 127.0.0.1 and ends with the `with` block it was started in.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.fake_worker import MODEL, SLOT
from bench.proxy_process import ROOT, Place, Start, Way, free_port, process, proxy

PEERS = ROOT / ".venv-bench-peers"
PACKAGES = ("litellm[proxy]==1.108.0", "vllm-router==0.1.17")
LITELLM_KEY = "sk-bench"
NO_LIMIT = {"qps": 1_000_000, "burst": 1_000_000, "concurrency": 1_000_000}  # never reached, always counted
_MANY = 1_000_000_000


@contextlib.contextmanager
def direct(place: Place) -> Iterator[Way]:
    yield Way("direct", place.worker, "")


NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream worker {{ server {host}:{worker}; keepalive 512; keepalive_requests {many}; }}
    server {{
        listen 127.0.0.1:{port}; keepalive_requests {many};
        location / {{
            proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(place: Place) -> Iterator[Way]:
    """Passes bytes on, as the best that can be had; it routes by no model."""
    said = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    port, (host, worker) = free_port(), place.worker
    file = place.folder / "nginx.conf"
    file.write_text(NGINX.format(folder=place.folder, host=host, worker=worker, port=port, many=_MANY))
    command = ["nginx", "-p", str(place.folder), "-c", str(file)]
    with proxy(place, "nginx", said.strip().rpartition("/")[2], port, command) as way:
        yield way


def _fleet(place: Place, gateway: dict[str, Any], name: str) -> Path:
    """A fleet file and the routes to the worker, as a supervisor would have written them."""
    folder = place.folder / name
    folder.mkdir()
    (folder / "model.json").write_text("{}")
    file = folder / "fleet.json"  # JSON is YAML
    file.write_text(
        json.dumps({
            "gateway": {"limits": {"default": NO_LIMIT}, **gateway},
            "supervisor": {"state_dir": str(folder)},
            "models": [{"name": MODEL, "source": f"random:{folder}/model.json"}],
        })
    )  # fmt: skip
    address = "http://{}:{}".format(*place.worker)
    target = {"slot": SLOT, "generation": 1, "address": address, "state": "ready"}
    routes = {"model": MODEL, "epoch": 1, "targets": [target]}
    (folder / "routes.json").write_text(json.dumps({"epoch": 1, "models": {MODEL: routes}}))
    return file


@contextlib.contextmanager
def _pagefleet(place: Place, name: str, file: Path, headers: str = "") -> Iterator[Way]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        command = [sys.executable, "-m", "gateway", "--config", str(file), "--fd", str(descriptor)]
        options = {"pass_fds": [descriptor], "cwd": ROOT}
        with proxy(place, name, "this commit", port, command, headers, **options) as way:
            yield way


@contextlib.contextmanager
def pagefleet(place: Place) -> Iterator[Way]:
    """One gateway process: routing by model, limits in memory, metrics."""
    with _pagefleet(place, "pagefleet", _fleet(place, {}, "memory")) as way:
        yield way


@contextlib.contextmanager
def pagefleet_full(place: Place) -> Iterator[Way]:
    """The same with limits in Redis, API keys and an audit log."""
    port = free_port()
    redis = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(place.folder),
    ]
    gateway = {
        "redis_url": f"redis://127.0.0.1:{port}/0",
        "auth": {"mode": "keys"},
        "audit": {"file": str(place.folder / "audit.jsonl")},
    }
    file = _fleet(place, gateway, "full")
    make_key = ["keys", "create", "--file", str(file), "--user", "bench", "--json"]
    made = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *make_key], capture_output=True, text=True, check=True, cwd=ROOT
    )
    headers = f"authorization: Bearer {json.loads(made.stdout)['key']}\r\n"
    with (
        process(place, "redis", redis, place.load_core),
        _pagefleet(place, "pagefleet-full", file, headers) as way,
    ):
        yield way


def _peer(program: str) -> str:
    """A program of the peers' environment, which is made if need be."""
    stamp = PEERS / "packages"
    wanted = "\n".join(PACKAGES)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(PACKAGES)} into {PEERS.name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PEERS)], check=True)
        subprocess.run([str(PEERS / "bin" / "pip"), "install", "-q", *PACKAGES], check=True)
        stamp.write_text(wanted)
    return str(PEERS / "bin" / program)


@contextlib.contextmanager
def vllm_router(place: Place) -> Iterator[Way]:
    port, metrics = free_port(), free_port()
    command = [
        _peer("vllm-router"), "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", "http://{}:{}".format(*place.worker), "--policy", "round_robin",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        "--log-level", "warning",
    ]  # fmt: skip
    with proxy(place, "vllm-router", PACKAGES[1].rpartition("=")[2], port, command) as way:
        yield way


@contextlib.contextmanager
def litellm(place: Place) -> Iterator[Way]:
    port, file = free_port(), place.folder / "litellm.yaml"
    base = "http://{}:{}/v1".format(*place.worker)
    parameters = {"model": f"openai/{MODEL}", "api_base": base, "api_key": "none"}
    file.write_text(
        json.dumps({
            "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
            "general_settings": {"master_key": LITELLM_KEY},
        })
    )  # fmt: skip
    command = [_peer("litellm"), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
    options = {
        "env": {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        "cwd": place.folder,
    }
    headers = f"authorization: Bearer {LITELLM_KEY}\r\n"
    version = PACKAGES[0].rpartition("=")[2]
    with proxy(place, "litellm", version, port, command, headers, **options) as way:
        yield way


WAYS: dict[str, Start] = {
    "direct": direct,
    "pagefleet": pagefleet,
    "pagefleet-full": pagefleet_full,
    "nginx": nginx,
    "vllm-router": vllm_router,
    "litellm": litellm,
}
