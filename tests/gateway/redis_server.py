"""Real redis-server processes for tests: on a Unix socket, and on free ports where they must meet."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One process; `url` reaches it. Nothing is saved, so a restart finds it empty. `sentinel`: the
    configuration file that makes it a sentinel instead."""

    def __init__(self, folder: Path, *options: str, port: int = 0, sentinel: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "redis.sock"
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0" if port else f"unix://{self.socket}"
        self._folder = folder
        self._options = [*options, "--sentinel"] if sentinel else ["--save", "", *options]
        self._file = [sentinel] if sentinel else []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        server = shutil.which("redis-server")
        assert server is not None
        place = ["--dir", str(self._folder), "--unixsocket", str(self.socket), "--bind", "127.0.0.1"]
        command = [server, *self._file, "--port", str(self.port), *place, "--daemonize", "no", *self._options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self.answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, "redis-server doesn't answer"
            time.sleep(0.02)
        return self

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:  # it is there
            return True
        except (redis.RedisError, OSError):
            return False

    def client(self, **options: object) -> redis.Redis:
        once = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=30, retry=once, **options)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@contextlib.contextmanager
def running(folder: Path, *options: str, port: int = 0) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, port=port)
    try:
        yield server.start()
    finally:
        server.kill()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[tuple[str, list[RedisServer]]]:
    """(URL, [master, replica]) watched by two sentinels, the first of which isn't there."""
    with contextlib.ExitStack() as stack:
        at_once = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(running(folder / "master", *at_once, port=free_port()))
        of_master = ("--replicaof", f"127.0.0.1 {master.port}")
        replica = stack.enter_context(running(folder / "replica", *of_master, port=free_port()))
        port, place = free_port(), folder / "sentinel"
        place.mkdir()
        file = place / "sentinel.conf"
        file.write_text(
            f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 2500\nsentinel failover-timeout main 5000\n"
        )
        watch = RedisServer(place, port=port, sentinel=str(file))
        stack.callback(watch.kill)
        watch.start()
        deadline = time.monotonic() + 60
        with watch.client() as client, replica.client() as copy:
            while not (
                client.execute_command("SENTINEL REPLICAS main")
                and copy.info("replication")["master_link_status"] == "up"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main/0", [master, replica]
