"""A fleet that ends closes its port at once; what was asked before then goes on to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from gateway.config import load_fleet
from tests.gateway.fake_fleet import FAST
from tests.gateway.rig import http_post
from tests.gateway.supervised import PATIENCE, Running, fleet_file, running
from tests.gateway.test_supervisor_gateways import RealGateways

PATIENT = dataclasses.replace(FAST, drain=PATIENCE)
BODY = b'{"model":"ok"}'
REQUEST = http_post(BODY, b"connection: close\r\n")
WAITING = 20  # connections that no gateway has taken


class Client:
    """A connection to the fleet's port."""

    @classmethod
    async def connect(cls, fleet: Running) -> Client:
        client = cls()
        place = urlsplit(fleet.supervisor.url)
        client.reader, client.writer = await asyncio.open_connection(place.hostname, place.port)
        return client

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def status(self) -> int:
        async with asyncio.timeout(PATIENCE):
            answer = await self.reader.read()
        self.writer.close()
        return int(answer.split()[1])


async def until_refused(fleet: Running) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                (await Client.connect(fleet)).writer.close()
            except ConnectionRefusedError:
                return
            await asyncio.sleep(0.01)


async def until_ready(fleet: Running, processes: int) -> list[str]:
    """The gateways' slots."""
    slots = [status.slot for status in fleet.supervisor.statuses if status.role == "gateway"]
    assert len(slots) == processes
    for slot in (*slots, "ok-0"):
        await fleet.until_state(slot, "ready")
    while True:
        client = await Client.connect(fleet)
        client.send(REQUEST)
        if await client.status() == 200:
            return slots


def down(fleet: Running) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "gateway.cli", "down", "--state-dir", fleet.state.root])


@pytest.mark.parametrize(("way", "processes"), [("down", 1), ("SIGTERM", 3), ("SIGINT", 1)])
async def test_new_connections_are_refused_while_what_is_in_flight_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, processes: int
) -> None:
    monkeypatch.setenv("PAGEFLEET_GATEWAY__PROCESSES", str(processes))
    path = fleet_file(tmp_path, "ok")
    async with running(path, PATIENT, RealGateways(load_fleet(path))) as fleet:
        slots = await until_ready(fleet, processes)
        in_flight = await Client.connect(fleet)
        in_flight.send(REQUEST[:-1])
        pids = [fleet.unit(slot).pid or 0 for slot in slots]
        asked = down(fleet) if way == "down" else None
        if asked is None:
            os.kill(os.getpid(), signal.Signals[way])
        await until_refused(fleet)
        assert "stopping" in {fleet.unit(slot).state for slot in slots}
        in_flight.send(REQUEST[-1:])
        assert await in_flight.status() == 200
        async with asyncio.timeout(PATIENCE):
            assert await fleet.task == 0
    if asked is not None:
        assert await asyncio.to_thread(asked.wait, PATIENCE) == 0
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("processes", [1, 3])
async def test_connections_that_wait_when_it_ends_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("PAGEFLEET_GATEWAY__PROCESSES", str(processes))
    path = fleet_file(tmp_path, "ok")
    async with running(path, PATIENT, RealGateways(load_fleet(path))) as fleet:
        slots = await until_ready(fleet, processes)
        pids = [fleet.unit(slot).pid or 0 for slot in slots]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        waiting = [await Client.connect(fleet) for _ in range(WAITING)]
        for client in waiting:
            client.send(REQUEST)
        fleet.supervisor.request_stop()
        await fleet.until(lambda: all(fleet.unit(slot).state == "stopping" for slot in slots))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert [await client.status() for client in waiting] == [200] * WAITING
        assert await fleet.task == 0


async def test_a_gateway_that_is_started_again_leaves_the_port_open(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "ok")
    async with running(path, PATIENT, RealGateways(load_fleet(path))) as fleet:
        (slot,) = await until_ready(fleet, 1)
        for generation, number in enumerate((signal.SIGKILL, signal.SIGTERM), 2):
            pid = fleet.unit(slot).pid or 0
            os.kill(pid, number)
            await fleet.until(lambda: not psutil.pid_exists(pid))  # noqa: B023
            client = await Client.connect(fleet)  # nobody is there to take it
            client.send(REQUEST)
            await fleet.until_state(slot, "ready", generation)
            assert await client.status() in (200, 503)  # by what the new process knows of the workers so far
