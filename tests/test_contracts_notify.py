"""The notify protocol, to a real socket in the place of systemd's."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from contracts.notify import Notifier


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_what_is_said_arrives_as_datagrams(tmp_path: Path, kind: str) -> None:
    address = f"@pagefleet-{os.getpid()}" if kind == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0"))
        manager.settimeout(10)
        environment = {
            "NOTIFY_SOCKET": address,
            "WATCHDOG_USEC": "30000000",
            "WATCHDOG_PID": str(os.getpid()),
        }
        notifier = Notifier.from_environment(environment)
        assert environment == {}  # children don't speak for us
        assert notifier.watchdog == 10
        assert notifier.progress("weights 50%", 1.5)
        assert notifier.ready("serving")
        notifier.status("3 requests")
        notifier.status("3 requests")  # nothing new
        notifier.alive()
        assert notifier.stopping("draining")
        said = [manager.recv(1000).decode() for _ in range(5)]
    assert said == [
        "EXTEND_TIMEOUT_USEC=1500000\nSTATUS=weights 50%",
        "READY=1\nSTATUS=serving",
        "STATUS=3 requests",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=draining",
    ]
    notifier.close()


def test_without_a_manager_nothing_is_said() -> None:
    notifier = Notifier.from_environment({})
    assert not notifier.is_used
    assert notifier.watchdog is None
    assert notifier.ready("serving")


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}
    assert Notifier.from_environment(environment).watchdog is None


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        notifier = Notifier(path)
        sent = 0
        while notifier.ready("serving"):
            sent += 1
            assert sent < 1_000_000
        assert not notifier.send("WATCHDOG=1")
        for _ in range(sent):
            manager.recv(1000)
        assert notifier.ready("serving")
    assert not Notifier(str(tmp_path / "gone")).ready("serving")
    notifier.close()
