"""Fixtures of several files. Tests of the gateway's data plane run on uvloop, as the gateway does; the rest
on asyncio's own loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from gateway.identity.store import KEYS_FILE, KeyStore
from tests.gateway.oidc_issuer import Issuer, ec, okp, rsa
from tests.gateway.redis_server import RedisServer, running

_ON_UVLOOP = (
    *("upstream", "proxy", "streams", "retry", "disconnect", "app", "server"),
    *("auth", "auth_processes", "auth_users"),
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem.removeprefix("test_") in _ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of whoever runs the tests, and relative paths lead into the test's own directory."""
    for name in os.environ:
        if name.startswith("PAGEFLEET_") and "__" in name:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyStore]:
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        yield store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running(tmp_path / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def shared_issuer() -> Iterator[Issuer]:
    """Making RSA keys takes time; most tests change nothing of it."""
    issuer = Issuer()
    issuer.keys = [rsa("rsa-1"), ec("ec-1"), okp("okp-1")]
    yield issuer
    issuer.stop()


@pytest.fixture
def issuer(shared_issuer: Issuer) -> Iterator[Issuer]:
    keys = list(shared_issuer.keys)
    shared_issuer.asked.clear()
    yield shared_issuer
    shared_issuer.keys, shared_issuer.answers, shared_issuer.pause = keys, {}, 0.0
