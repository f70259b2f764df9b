"""A fleet of fake models behind real gateways, and users who must not notice that a model is swapped.

`python -m tests.gateway.swapping up FILE` is `pagefleet up` with fake models.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

import gateway.fleet.driver.planning as planning_module
import gateway.fleet.supervisor as supervisor_module
from gateway.cli import main
from gateway.config import FleetFile, load_fleet
from gateway.fleet.commands import Commands, Slot
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.driver.rollouts import Rollouts
from gateway.fleet.ledger import Ledger, make_ledger
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.state import Routes, read_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.supervisor import Supervisor
from gateway.fleet.unit import UnitStatus
from tests.gateway.fake_fleet import FAST

SCRIPT = str(Path(__file__).with_name("fake_model.py"))
COMMAND = (sys.executable, "-m", "tests.gateway.swapping")
PATIENCE = 120.0  # the machine may be busy
TIMING = dataclasses.replace(FAST, start_stall=PATIENCE, unhealthy=PATIENCE)
QUICK: dict[str, Any] = {"steps": (50.0, 100.0), "hold": 0.0}


class FakeModels(Commands):
    """Real gateways in front of workers that behave as their source is named: ``fake/BEHAVIOUR``."""

    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        behaviour = slot.entry.source.rpartition("/")[2]
        place = ["--uds", str(uds), "--slot", slot.name, "--generation", str(generation)]
        return [sys.executable, "-P", SCRIPT, behaviour, *place]


def fleet_file(folder: Path, model: str = "", more: str = "", gateway: str = "") -> Path:
    """A fleet of the model `m`, alias `nick`. `model`: more of its keys. A busy machine makes times that a
    judge with the usual limits would doubt."""
    path = folder / "fleet.yaml"
    path.write_text(
        f"gateway: {{port: 0{gateway and ', ' + gateway}}}\n"
        f"supervisor: {{state_dir: {folder / 'state'}}}\n"
        "models:\n"
        f"  - {{name: m, aliases: [nick], source: fake/ok, "
        "judge: {min_requests: 5, max_ttft_ratio: 10, max_tpot_ratio: 10}"
        f"{model and ', ' + model}}}\n"
        f"{more}"
    )
    return path


class Swapping:
    """A supervisor in this process."""

    def __init__(self, fleet: FleetFile) -> None:
        self.history: list[UnitStatus] = []
        commands = FakeModels(os.getpid(), fleet)
        self.supervisor = Supervisor(fleet, commands=commands, timing=TIMING, on_change=self.history.append)
        self.state = StateDir(fleet.supervisor.state_dir)
        self.code: int | None = None

    @property
    def rollouts(self) -> Rollouts:
        return self.supervisor.rollouts

    @property
    def routes(self) -> Routes:
        return read_routes(self.state.routes).models["m"]

    def slots(self) -> dict[str, str]:
        """State of each worker, by slot."""
        return {unit.slot: unit.state for unit in self.supervisor.statuses if unit.role == "worker"}

    async def start(self, source: str, **options: Any) -> Rollout:
        asked = StartRequest(source=source, options=Options(**{**QUICK, **options}))
        return await self.rollouts.start("m", asked)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_phase(self, *phases: str) -> Rollout:
        await self.until(lambda: self.rollouts.status("m").phase in phases)
        return self.rollouts.status("m")

    async def over(self) -> Rollout:
        """The rollout at its end."""
        try:
            await self.until(lambda: not self.rollouts.under_way("m"))
        except TimeoutError:
            raise AssertionError(f"{self.rollouts.status('m')}, {self.supervisor.statuses}") from None
        return self.rollouts.status("m")

    async def ready(self) -> None:
        """The model, and a gateway that knows it."""
        options: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": PATIENCE}
        async with httpx.AsyncClient(base_url=self.supervisor.url, **options) as client:
            async with asyncio.timeout(PATIENCE):
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get("/ready")).status_code == 200:
                            return
                    await asyncio.sleep(0.05)


def no_ledger(*_: object) -> Ledger:
    """Fake models have no size; a real ledger takes a process and a second to say so."""
    return Ledger(workers=(), places=(), problems=())


@contextlib.asynccontextmanager
async def swapping(path: Path, ledger: Callable[..., Ledger] = no_ledger) -> AsyncIterator[Swapping]:
    """A fleet whose model is ready."""
    setattr(planning_module, "make_ledger", ledger)  # noqa: B010
    fleet = Swapping(load_fleet(path))
    with fleet.supervisor.open():
        task = asyncio.create_task(fleet.supervisor.run())
        instance = ""
        try:
            await fleet.until(lambda: task.done() or fleet.state.records.exists())
            records = read_records(fleet.state.records)
            instance = records.instance if records else ""
            await fleet.ready()
            yield fleet
        finally:
            fleet.supervisor.request_stop()
            fleet.code = await task
            setattr(planning_module, "make_ledger", make_ledger)  # noqa: B010
    assert marked(instance) == []


@dataclasses.dataclass
class Users:
    """Several users, each with one request after the other: some short, some streamed.

    `served`: how many answers came of each target; `failures`: everything that wasn't one, whole."""

    url: str
    served: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    longest: float = 0.0  # seconds until an answer began
    _stop: bool = False

    async def _user(self, client: httpx.AsyncClient, name: str) -> None:
        number = 0
        while not self._stop:
            number += 1
            began = time.monotonic()
            is_stream = number % 3 == 0
            fake = {"chunks": 8 if is_stream else 1, "delay": 0.02}
            body = {"model": "m", "stream": is_stream, "user": name, "fake": fake}
            try:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    self.longest = max(self.longest, time.monotonic() - began)
                    text = (await response.aread()).decode()
            except httpx.HTTPError as error:
                self.failures.append(f"{name} {number}: {error!r}")
                continue
            whole = text.count("data: {") == 8 and "[DONE]" in text if is_stream else "served_by" in text
            if response.status_code != 200 or not whole:
                self.failures.append(f"{name} {number}: {response.status_code} {text[-200:]}")
            target = response.headers.get("x-pagefleet-target", "none")
            self.served[target] = self.served.get(target, 0) + 1
            await asyncio.sleep(0.05)  # a hundred requests a second in all are enough


@contextlib.asynccontextmanager
async def users(url: str, count: int = 6) -> AsyncIterator[Users]:
    """Users who go on until the end of the block."""
    # Held up ourselves: a gateway that ends closes what is idle for a second, as every client knows.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=count, keepalive_expiry=0.5)
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE, limits=limits, trust_env=False, verify=False
    ) as client:
        load = Users(url)
        tasks = [asyncio.create_task(load._user(client, f"user-{number}")) for number in range(count)]
        try:
            yield load
        finally:
            load._stop = True
            await asyncio.gather(*tasks)


if __name__ == "__main__":
    setattr(supervisor_module, "Commands", FakeModels)  # noqa: B010
    setattr(planning_module, "make_ledger", no_ledger)  # noqa: B010
    setattr(supervisor_module, "Timing", lambda **_: TIMING)  # noqa: B010
    setattr(importlib.import_module("gateway.cli.up"), "OWN_COMMAND", COMMAND)  # noqa: B010
    main(prog_name="pagefleet")
