"""A real nginx on a free port of 127.0.0.1, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from gateway.fleet.nginx import NginxOptions
from tests.gateway.rig import until

USER = "root" if os.geteuid() == 0 else None


def standalone(**options: Any) -> NginxOptions:
    """Of an nginx that has its logs in its own directory."""
    return NginxOptions(standalone=True, user=USER, access_log="access.log", error_log="error.log", **options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Nginx:
    """A real one in `folder`, that runs what `write` gave it last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "nginx.conf"
        self.port = free_port()
        self.listen = (f"127.0.0.1:{self.port}",)

    def write(self, text: str) -> None:
        self.config.write_text(text)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Nginx]:
        argv = ["nginx", "-p", str(self.folder), "-c", str(self.config), "-g", "daemon off;"]
        self.process = await asyncio.create_subprocess_exec(*argv)
        try:
            await until(self.accepts)
            yield self
        finally:
            with contextlib.suppress(ProcessLookupError):  # it did not start
                self.process.send_signal(signal.SIGTERM)
            await self.process.wait()

    def accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    async def reload(self) -> None:
        before = self.pids()
        self.process.send_signal(signal.SIGHUP)
        await until(lambda: not self.pids() & before)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "access.log").read_text().splitlines()]
