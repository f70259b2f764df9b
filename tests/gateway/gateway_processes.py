"""Gateway processes on one socket, as a supervisor starts them, and clients under load."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from gateway.board import Peer
from gateway.fleet.statedir import StateDir
from tests.gateway.forked import ForkedGateway
from tests.gateway.rig import Rig, http_post, target, until

PROCESSES = 3
BODY = b'{"model":"m"}'
Ask = Callable[..., Awaitable[tuple[int, str, bytes]]]


class Gateways:
    """A gateway process, or by `programs` something else, in every slot, on one inherited socket, in front of
    the rig's workers."""

    def __init__(
        self,
        rig: Rig,
        listener: socket.socket,
        auth: str = "none",
        programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.rig = rig
        self.programs = programs
        self.listener = listener
        self.slots = [f"gateway{number}" for number in range(PROCESSES)]
        self.children: dict[str, subprocess.Popen[bytes] | ForkedGateway] = {}
        self.generation = 0
        self.state = StateDir(rig.folder)
        self.state.run.mkdir(exist_ok=True)
        self.state.place_boards(self.slots)
        config = rig.folder / "fleet.yaml"
        config.write_text(
            f"gateway: {{processes: {PROCESSES}, auth: {{mode: {auth}}}}}\n"
            "models: [{name: m, source: o/n}]\nsupervisor: {drain_timeout: 20s}\n"
        )

    async def start(self, *slots: str) -> None:
        """Starts processes and waits until they serve."""
        self.generation += 1
        for slot in slots:
            self._spawn(slot)
        for slot in slots:
            await until(partial(self._serves, slot))
        await asyncio.sleep(0.3)  # they see each other

    def _spawn(self, slot: str) -> None:
        options = ["--config", str(self.rig.folder / "fleet.yaml"), "--state-dir", str(self.rig.folder)]
        options += ["--slot", slot, "--generation", str(self.generation)]
        path = self.rig.folder / f"{slot}.log"
        if slot not in self.programs:
            self.children[slot] = ForkedGateway(options, path, self.listener)
            return
        descriptor = self.listener.fileno()
        command = [sys.executable, *self.programs[slot], *options, "--fd", str(descriptor)]
        with path.open("ab") as log:
            self.children[slot] = subprocess.Popen(command, pass_fds=[descriptor], stderr=log)

    def _serves(self, slot: str) -> bool:
        reading = Peer(self.state.board(slot)).read()
        return reading is not None and reading.alive and reading.generation == self.generation

    def connections(self) -> list[int]:
        readings = [Peer(self.state.board(slot)).read() for slot in self.slots]
        return [reading.connections for reading in readings if reading is not None]

    def leaving(self) -> bool:
        """Whether all have been told to end, and know it."""
        readings = [Peer(self.state.board(slot)).read() for slot in self.slots]
        return all(reading is not None and reading.leaving for reading in readings)

    def kill(self, slot: str) -> None:
        self.children[slot].kill()
        self.children[slot].wait()

    async def ended(self, slot: str) -> int | None:
        child = self.children[slot]
        await until(lambda: child.poll() is not None)
        return child.returncode

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.listener.family == socket.AF_UNIX:
            return await asyncio.open_unix_connection(self.listener.getsockname())
        return await asyncio.open_connection(*self.listener.getsockname())

    async def get(self, path: str, headers: str = "") -> tuple[int, str, bytes]:
        """(status, process that answered, body), over a connection of its own."""
        reader, writer = await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}connection: close\r\n\r\n".encode())
        try:
            async with asyncio.timeout(60):
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return *_who(head), body

    @contextlib.asynccontextmanager
    async def everyone(self) -> AsyncIterator[list[Ask]]:
        """Connections kept alive, at least two to each process: who takes those that are closed after each
        answer is left to the kernel, and may be the same one every time."""
        held = []
        try:
            while any(count < 2 for count in self.connections()):
                held.append(await self.connect())
                await until(lambda: sum(self.connections()) == len(held))
            yield [partial(self.ask, *pair) for pair in held]
        finally:
            for _, writer in held:
                writer.close()
        await until(lambda: sum(self.connections()) == 0)

    async def ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, headers: str = ""
    ) -> tuple[int, str, bytes]:
        """As `get`, over a connection that is kept."""
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            body = await reader.readexactly(int(length[1]))
        return *_who(head), body

    async def metrics(self) -> dict[str, float]:
        """Name and label values → value, of whichever process answers."""
        page = (await self.get("/metrics"))[2].decode()
        return {
            ",".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    async def until_metrics(self, expected: dict[str, float]) -> None:
        """Until they say so, whoever answers. A request is counted right after its answer, and what a process
        has in flight is on its board a moment later."""
        async with asyncio.timeout(60):
            while not expected.items() <= (await self.metrics()).items():
                await asyncio.sleep(0.05)
        for _ in range(6):
            page = await self.metrics()
            assert {name: page[name] for name in expected} == expected


def _who(head: bytes) -> tuple[int, str]:
    """Status, and the process that answered."""
    found = re.search(rb"x-request-id: ([0-9a-f]+)-", head)
    assert found is not None, head
    return int(head.split()[1]), found[1].decode()


@contextlib.asynccontextmanager
async def gateways(
    folder: Path,
    *,
    auth: str = "none",
    unix: bool = False,
    programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> AsyncIterator[tuple[Gateways, Rig]]:
    rig = Rig(folder)
    rig.route(target(await rig.worker()))
    if unix:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "g.sock"))
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    listener.listen(512)
    running = Gateways(rig, listener, auth, programs)
    try:
        async with asyncio.timeout(180):
            await running.start(*running.slots)
            yield running, rig
    finally:
        for child in running.children.values():
            child.kill()
            child.wait()
        listener.close()
        running.state.remove_boards()
        for worker in rig.workers:
            await worker.stop()
    for slot in running.slots:
        assert "Traceback" not in (folder / f"{slot}.log").read_text()


class Client:
    """Asks again and again, over one connection as long as that is kept alive."""

    def __init__(self, running: Gateways, body: bytes = BODY) -> None:
        self._running = running
        self._body = body
        self.answers = 0
        self.failures: list[str] = []
        self.connections = 0

    async def run(self, until_done: Callable[[], bool]) -> None:
        while not until_done():
            self.connections += 1
            reader, writer = await self._running.connect()
            try:
                may_ask = True
                while may_ask and not until_done():
                    may_ask = await self._ask(reader, writer)
                    answered = time.monotonic()
                    await asyncio.sleep(0.002)
                    # Held up ourselves: a connection so long idle may be closed, as every client knows.
                    may_ask = may_ask and time.monotonic() < answered + 0.5
            except (OSError, asyncio.IncompleteReadError) as error:
                self.failures.append(repr(error))
            finally:
                writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        writer.write(http_post(self._body))
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
        assert head.startswith(b"HTTP/1.1 200 "), head
        self.answers += 1
        return b"connection: close" not in head
