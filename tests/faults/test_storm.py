"""A storm of requests and of clients that leave: afterwards nothing runs, is held, or has grown."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from contracts.options import WorkerOptions
from tests.worker.fake_engine import events
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from tests.worker.real_worker import RealWorker, real_worker, wait_until
from worker.engine.process import EngineSpec
from worker.ipc.client import EngineClient, engine_command
from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REQUESTS = 500
CLIENTS = 24
PAGES = 44  # for a dozen running answers of up to 300 tokens each: far too few, so that some are preempted
LIMITS = {"max-num-seqs": "12", "max-num-batched-tokens": "96", "num-gpu-blocks-override": str(PAGES)}
MAX_GROWTH = 24 << 20  # bytes, over two thirds of a storm

SHARED = "When a worker dies, its requests hear of it at once, and the fleet sails on. " * 3
INVALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": "x", "temperature": 9}),
    ("/v1/completions", {"prompt": [1] * 5000}),
    ("/v1/chat/completions", {"messages": []}),
    ("/generate", {"prompt": "x", "n": 2}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama", SMALL, write_byte_bpe(directory))
    return directory


@pytest.fixture(scope="module")
def worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorker]:
    options = [f"--{name}={value}" for name, value in LIMITS.items()]
    with real_worker(tmp_path_factory.mktemp("worker"), model, *options) as running:
        yield running


@dataclass
class Storm:
    """Random requests from a bounded number of clients; counts what became of them."""

    worker: RealWorker
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)

    async def run(self, count: int) -> None:
        turns = iter(range(count))

        async def client() -> None:
            async with self.worker.async_client() as http:
                for _ in turns:
                    self.outcomes[await self._request(http)] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _request(self, http: httpx.AsyncClient) -> str:
        rng = self.rng
        if rng.random() < 0.08:
            path, body = rng.choice(INVALID)
            answer = await http.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            return "invalid"
        path, body = self._valid()
        if rng.random() < 0.35:
            return await self._leave(http, path, body)
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check_complete(path, body, answer.text)
        return "complete"

    async def _leave(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
        """Hang up: some clients at once, some after a while, some in the middle of a stream."""
        patience = self.rng.choice([0.0, 0.01, 0.05, 0.2])
        try:
            async with asyncio.timeout(patience), http.stream("POST", path, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    if self.rng.random() < 0.2:
                        return "left"
        except TimeoutError:
            return "left"
        return "complete"

    def _valid(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        words = ["fleet", "worker", "page", "token", "prompt", "número", "13"]
        text = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 40)))
        prompt = rng.choice([text, SHARED + text, SHARED[: rng.randrange(20, 200)]])
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": rng.choice([1, 4, 16, 60]),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "ignore_eos": rng.random() < 0.7,
            "priority": rng.randrange(-2, 3),
            "stream": rng.random() < 0.5,
            "cache_salt": rng.choice(["", "", "tenant"]),
        }
        kind = rng.randrange(4)
        if kind == 0:
            return "/generate", {**body, "prompt": prompt}
        body["n"] = rng.choice([1, 1, 1, 2, 4])
        body["stop"] = rng.choice([None, ["e"], [" the", "worker"]])
        if kind == 1:
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        several = rng.choice([prompt, [prompt, "1, 2, 3"], [5, 6, 7]])
        return "/v1/completions", {**body, "prompt": several}


def check_complete(path: str, body: dict[str, Any], text: str) -> None:
    """Every answer of the request has come to its end."""
    expected = body.get("n", 1) * (
        2 if isinstance(body.get("prompt"), list) and len(body["prompt"]) == 2 else 1
    )
    if not body["stream"]:
        answer = json.loads(text)
        choices = answer.get("choices", [answer])
    elif path == "/generate":
        choices = [json.loads(text.splitlines()[-1])]
    else:
        chunks = events(text)
        assert chunks[-1] == "[DONE]"
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    finished = [choice for choice in choices if choice["finish_reason"] is not None]
    assert len(finished) == expected
    assert {choice["finish_reason"] for choice in finished} <= {"stop", "length"}


def golden(worker: RealWorker) -> list[int]:
    answer = worker.post("/generate", prompt=SHARED, temperature=0, max_tokens=20, ignore_eos=True)
    tokens: list[int] = answer.json()["token_ids"]
    assert len(tokens) == 20
    return tokens


def test_five_hundred_requests_and_random_aborts(worker: RealWorker) -> None:
    expected = golden(worker)
    descriptors = worker.server.num_fds(), worker.engine.num_fds()
    storm = Storm(worker, random.Random(7))
    asyncio.run(storm.run(REQUESTS // 3))
    warm = memory(worker)
    asyncio.run(storm.run(REQUESTS - REQUESTS // 3))
    wait_until(lambda: not worker.busy())
    grown = [after - before for before, after in zip(warm, memory(worker))]
    assert max(grown) < MAX_GROWTH, f"server and engine have grown by {grown} bytes"
    assert storm.outcomes.total() == REQUESTS
    assert min(storm.outcomes["left"], storm.outcomes["complete"]) > 50
    assert storm.outcomes["invalid"] > 20
    assert worker.metric("num_preemptions_total") > 0
    assert golden(worker) == expected
    # The connection of `worker.client` is there before and after.
    wait_until(lambda: (worker.server.num_fds(), worker.engine.num_fds()) == descriptors)
    assert worker.server.children(recursive=True) == [worker.engine]
    assert worker.client.get("/health").status_code == 200


def memory(worker: RealWorker) -> list[int]:
    return [process.memory_info().rss for process in (worker.server, worker.engine)]


def test_five_hundred_disconnects_end_everything(worker: RealWorker) -> None:
    """Streams that would go on for minutes, each left at its first bytes or before them."""
    body = {"model": "tiny", "prompt": SHARED, "max_tokens": 600, "ignore_eos": True, "stream": True}
    aborted = finished(worker, "abort")

    async def leave(number: int) -> None:
        """After the first byte of a stream, or while an answer that comes whole is being made."""
        reader, writer = await asyncio.open_unix_connection(str(worker.uds))
        data = json.dumps({**body, "stream": number % 2 == 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        if number % 2 == 0:
            assert (await reader.readline()).split()[1] == b"200"
        else:
            await asyncio.sleep(0.02)
        writer.close()

    async def all_of_them() -> None:
        for _ in range(10):
            await asyncio.gather(*(leave(number) for number in range(50)))

    descriptors = worker.server.num_fds()
    asyncio.run(all_of_them())
    wait_until(lambda: not worker.busy())
    assert finished(worker, "abort") - aborted >= 250  # some left before they were heard
    wait_until(lambda: worker.server.num_fds() == descriptors)


def finished(worker: RealWorker, reason: str) -> float:
    lines = worker.client.get("/metrics").text.splitlines()
    name = "pagefleet_request_success_total{"
    (line,) = [line for line in lines if line.startswith(name) and f'"{reason}"' in line]
    return float(line.rsplit(" ", 1)[1])


async def test_the_engine_s_books_balance_after_a_storm(model: Path) -> None:
    """The engine process by itself: it says whether every page is free, and all its maps agree."""
    rng = random.Random(3)
    limits = {name.replace("-", "_"): int(value) for name, value in LIMITS.items()}
    options = WorkerOptions(threads=1, **limits)  # type: ignore[arg-type]
    spec = EngineSpec(str(model), options.model_dump(exclude_defaults=True))
    engine = EngineClient(engine_command(json.dumps({"model": spec.model, "options": spec.options})))
    await engine.start()
    try:
        await engine.wait_ready()
        turns = iter(range(REQUESTS // 2))

        async def client() -> None:
            for number in turns:
                prompt = [*range(rng.randrange(5, 60)), *rng.choices(range(400), k=rng.randrange(1, 100))]
                params = SamplingParams(
                    max_tokens=rng.choice([1, 20, 80]), temperature=rng.choice([0.0, 1.0]), ignore_eos=True
                )
                stream = engine.submit(
                    EngineRequest(str(number), prompt, params, number, priority=rng.randrange(3))
                )
                lifetime = rng.choice([0, 2, 10, 1000])
                async for output in stream:
                    assert output.finish_reason != "error", output.error
                    lifetime -= 1
                    if lifetime <= 0:
                        engine.abort(str(number))
                if number % 50 == 0:
                    assert await engine.call("check_integrity") == ""

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        assert await engine.call("check_integrity") == ""
        assert engine.in_flight == 0
        assert (engine.stats.running, engine.stats.waiting, engine.stats.pages_used) == (0, 0, 0)
        assert engine.stats.pages_total == PAGES - 1
        assert engine.stats.preemptions > 0
    finally:
        pid = engine.pid
        await engine.shutdown()
    assert pid is not None
    assert not psutil.pid_exists(pid)
