"""The same swaps with real worker processes (their engines have no model): fence, drain, and end are real."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from contracts.times import Times
from gateway.fleet.observer import Observer
from gateway.fleet.state import Target
from tests.gateway.gateway_processes import gateways
from tests.gateway.numbered_load import Asked, Load
from tests.gateway.rig import until

FAKE = [sys.executable, "-m", "tests.worker.fake_worker", "--model", "fake", "--served-model-name", "m"]
PATHS = ("/v1/completions", "/generate")


@dataclass
class Worker:
    """`python -m worker` on a Unix socket."""

    generation: int
    uds: Path
    process: subprocess.Popen[bytes]
    times: Times = field(default_factory=Times)

    @classmethod
    def start(cls, folder: Path, generation: int) -> Worker:
        uds = folder / f"v{generation}.sock"
        place = ["--uds", str(uds), "--slot", f"v{generation}", "--generation", str(generation)]
        with (folder / f"v{generation}.log").open("wb") as log:
            return cls(generation, uds, subprocess.Popen([*FAKE, *place], stderr=log))

    def target(self, weight: int) -> Target:
        return Target(
            slot=f"v{self.generation}",
            generation=self.generation,
            address=f"unix:{self.uds}",
            weight_bp=weight,
            state="ready",
            variant=str(self.generation),
        )

    async def ask(self, method: str, path: str) -> httpx.Response | None:
        transport = httpx.AsyncHTTPTransport(uds=str(self.uds))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=60) as client:
            try:
                return await client.request(method, path)
            except httpx.TransportError:
                return None

    async def ready(self) -> None:
        async with asyncio.timeout(120):
            while (answer := await self.ask("GET", "/ready")) is None or answer.status_code != 200:
                assert self.process.poll() is None
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Fences it, waits until it has no request, and ends it as a supervisor does."""
        async with asyncio.timeout(120):
            while (answer := await self.ask("POST", "/admin/drain")) is None or answer.json()["inflight"]:
                await asyncio.sleep(0.02)
        await self.note()
        self.process.terminate()
        await until(lambda: self.process.poll() is not None)
        assert self.process.returncode == 0

    async def note(self) -> None:
        answer = await self.ask("GET", "/internal/window")
        assert answer is not None
        self.times = msgspec.json.decode(answer.content, type=Times)


def ask(number: int, user: str, rng: random.Random) -> Asked:
    """For so many tokens, each of which is an A."""
    tokens, stream, path = rng.randrange(1, 9), rng.random() < 0.5, rng.choice(PATHS)
    body = {"model": "m", "prompt": f"{number}", "max_tokens": tokens, "stream": stream, "user": user}

    def text_of(answer: dict[str, Any]) -> str:
        text: str = answer["text"] if path == "/generate" else answer["choices"][0]["text"]
        return text

    def whole(answer: bytes) -> bool:
        return text_of(json.loads(answer)) == "A" * tokens

    def events(answer: bytes) -> bool:
        *pieces, last = answer.removesuffix(b"\n\n").split(b"\n\n")
        texts = [text_of(json.loads(piece.removeprefix(b"data: "))) for piece in pieces]
        return last == b"data: [DONE]" and "".join(texts) == "A" * tokens

    def lines(answer: bytes) -> bool:
        pieces = [json.loads(line) for line in answer.splitlines()]
        return bool(pieces[-1]["finish_reason"]) and "".join(map(text_of, pieces)) == "A" * tokens

    answered_by = whole if not stream else lines if path == "/generate" else events
    return Asked(json.dumps(body).encode(), answered_by, path)


async def test_swaps_of_real_workers_lose_nothing(tmp_path: Path) -> None:
    workers: list[Worker] = []
    async with gateways(tmp_path) as (running, rig):
        observer = Observer({slot: running.state.board(slot) for slot in running.slots})
        loading: asyncio.Task[None] | None = None
        try:
            workers.append(Worker.start(tmp_path, 1))
            await workers[0].ready()
            rig.route(workers[0].target(10_000))
            await until(lambda: observer.applied(rig.epoch))
            load = Load(running.connect, ask, at_a_time=12, pause=0.05)
            loading = asyncio.create_task(load.run())
            for generation in (2, 3):
                old, new = workers[-1], Worker.start(tmp_path, generation)
                workers.append(new)
                await new.ready()
                for share in (0, 5000, 10_000):
                    rig.route(old.target(10_000 - share), new.target(share), salt=str(generation))
                    await asyncio.sleep(0.3)
                mine = [f"v{old.generation}.{old.generation}"]
                if generation != 3:  # there it is fenced though gateways may still send it requests
                    await until(lambda: observer.applied(rig.epoch) and not observer.inflight("m", mine))  # noqa: B023
                await old.end()
                rig.route(new.target(10_000))
            load.stop()
            await loading
            load.check()
            assert len(load.whole) > 100
            await workers[-1].note()
            ids = [f"v{worker.generation}.{worker.generation}" for worker in workers]
            await until(lambda: observer.window("m", ids).requests == len(load.whole))
            assert observer.window("m", ids).errors == 0
            assert sum(sum(worker.times.ttft.values()) for worker in workers) == len(load.whole)
        finally:
            if loading is not None:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
