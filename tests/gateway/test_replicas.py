"""`replicas: N` as a whole: real supervisor and gateway, workers that can be told to misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx

from gateway.config import load_fleet
from gateway.fleet.commands import Commands, Slot
from gateway.fleet.state import read_routes
from tests.gateway import fake_worker
from tests.gateway.fake_fleet import FAST
from tests.gateway.supervised import Running, running

FLEET = """
gateway: {{port: 0, health: {{probe_interval: 100ms, probe_timeout: 2s, fail_timeout: 500ms}}}}
supervisor: {{state_dir: {folder}/state}}
models:
  - {{name: ok, source: o/n, replicas: 2}}
"""


class FakeWorkers(Commands):
    """The real gateway before fake workers."""

    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        place = ["--uds", str(uds), "--slot", slot.name, "--generation", str(generation)]
        return [sys.executable, str(fake_worker.__file__), *place]


def chat(number: int) -> dict[str, Any]:
    return {"model": "ok", "messages": [{"role": "user", "content": f"question {number}"}]}


async def ready(fleet: Running, *slots: str, generation: int = 1) -> None:
    async with asyncio.timeout(120):
        for slot in slots:
            while (fleet.unit(slot).state, fleet.unit(slot).generation) != ("ready", generation):
                await asyncio.sleep(0.02)


async def test_replicas_share_the_load_and_one_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.format(folder=tmp_path))
    commands: Any = FakeWorkers(os.getpid(), load_fleet(file))
    async with running(file, FAST, commands) as fleet:
        await ready(fleet, "ok-0", "ok-1", *(unit.slot for unit in fleet.supervisor.statuses))
        targets = read_routes(fleet.state.routes).models["ok"].targets
        assert {(target.slot, target.generation) for target in targets} == {("ok-0", 1), ("ok-1", 1)}
        assert len({target.address for target in targets}) == 2
        answers: list[httpx.Response] = []
        stop = False

        async def hammer(client: httpx.AsyncClient) -> None:
            while not stop:
                body = chat(len(answers)) | {"fake": {"do": "json", "wait": 0.01}}
                answers.append(await client.post("/v1/chat/completions", json=body))

        async def answered(count: int) -> None:
            goal = len(answers) + count
            async with asyncio.timeout(120):
                while len(answers) < goal:
                    await asyncio.sleep(0.01)

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=fleet.supervisor.url, timeout=60, limits=limits) as client:
            hammers = [asyncio.create_task(hammer(client)) for _ in range(8)]
            await answered(100)
            served = [answer.headers["x-pagefleet-target"] for answer in answers]
            assert min(served.count("ok-0.1"), served.count("ok-1.1")) > 20
            os.kill(fleet.unit("ok-0").pid or 0, signal.SIGKILL)
            await ready(fleet, "ok-0", generation=2)
            async with asyncio.timeout(120):
                while answers[-1].headers["x-pagefleet-target"] != "ok-0.2":
                    await asyncio.sleep(0.005)
            stop = True
            await asyncio.gather(*hammers)
            assert {answer.status_code for answer in answers} == {200}
            page = (await client.get("/metrics")).text
            assert 'pagefleet_gateway_target_up{model="ok",target="ok-0.2"} 1.0' in page
            assert 'pagefleet_worker_restarts_total{model="ok",slot="ok-0"} 1.0' in page
