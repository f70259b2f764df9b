"""More connections to the admin socket than the supervisor has descriptors: it answers, and swaps go on."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.fleet.admin_connections import MOST
from tests.faults.nursery import Fleet, Nursery

DESCRIPTORS = MOST + 150
CONNECTIONS = 2 * MOST
WHOLE = b"GET /rollouts/m?revision=%d&wait=60 HTTP/1.1\r\nhost: x\r\n\r\n"
KINDS = {
    "silent": b"",
    "half a head": b"GET /status HTTP/1.1\r\nhost: x\r\n",
    "half a body": b"POST /rollouts/m HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n{",
    "questions that wait": WHOLE,
}


@pytest.fixture(scope="module")
def fleet(made: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(made, tmp_path_factory.mktemp("fleet"))
    resource.prlimit(fleet.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    fleet.start()
    fleet.over()
    yield fleet
    fleet.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_who_asks_is_answered(fleet: Fleet, kind: str) -> None:
    words = WHOLE % fleet.rollout().revision if kind == "questions that wait" else KINDS[kind]
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(connection(fleet.state.admin_socket, words))
        assert fleet.status() is not None
        assert fleet.start(source="fake/ok", hold=0.0).phase == "starting"
        assert fleet.over().phase == "completed"


@contextlib.contextmanager
def connection(path: Path, words: bytes) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # given up at once
            one.sendall(words)
        yield
