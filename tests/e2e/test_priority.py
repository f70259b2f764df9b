"""Classes of keys from end to end: a real gateway, a real engine, batch work that fills pages and rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.identity.store import KEYS_FILE, KeyStore
from tests.gateway.rig import Rig, target, until
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from tests.worker.real_worker import RealWorker, real_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, PAGES = 8, 48
LENGTH = 400  # tokens of a batch answer: two of them fill most of the pool


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorker]:
    folder = tmp_path_factory.mktemp("worker")
    model = folder / "model"
    model.mkdir()
    write_checkpoint(model, "llama", SMALL, write_byte_bpe(model))
    options = ["--slot=s", "--generation=1", f"--max-num-seqs={ROWS}", f"--num-gpu-blocks-override={PAGES}"]
    with real_worker(folder, model, *options, "--max-num-batched-tokens=96") as running:
        yield running


def completion(length: int, prompt: str = "A fleet of workers") -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0}
    return {"model": "tiny", **body}


async def test_interactive_requests_overtake_batch_work_that_holds_everything(
    tmp_path: Path, worker: RealWorker
) -> None:
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        keys = {name: store.create(name, priority=name)[1] for name in ("high", "low")}
    headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
    rig = Rig(tmp_path, auth={"mode": "keys"}, health={"probe_interval": "100ms"})
    rig.limit = 280.0
    rig.route(target(f"unix:{worker.uds}"), model="tiny")
    done: list[str] = []

    async def ask(name: str, length: int, number: int) -> httpx.Response:
        response = await rig.post(
            completion(length, f"{name} {number}"), "/v1/completions", headers=headers[name], timeout=250
        )
        done.append(name)
        return response

    async with rig.running():
        router = rig.app.router
        batch = [asyncio.create_task(ask("low", LENGTH, number)) for number in range(16)]
        await until(lambda: router.queue("tiny").waiting >= 16 - ROWS - 1)
        await until(lambda: worker.metric("kv_cache_usage_ratio") > 0.8)
        urgent = [asyncio.create_task(ask("high", 24, number)) for number in range(4)]
        answers = await asyncio.gather(*urgent)
        assert {answer.status_code for answer in answers} == {200}
        assert done.count("low") <= 8  # most of the batch work is still there, and it had been first
        responses = await asyncio.gather(*batch)
        assert {response.status_code for response in responses} == {200}
        assert {response.json()["usage"]["completion_tokens"] for response in responses} == {LENGTH}
        # What was taken from batch work and computed again has changed nothing in it.
        alone = await ask("low", LENGTH, 3)
        assert alone.json()["choices"][0]["text"] == responses[3].json()["choices"][0]["text"]
        assert (rig.inflight(), router.queue("tiny").waiting) == (0, 0)
        await until(lambda: not worker.busy())


async def test_who_leaves_the_queue_never_reaches_the_engine(tmp_path: Path, worker: RealWorker) -> None:
    rig = Rig(tmp_path, health={"probe_interval": "100ms"})
    rig.limit = 280.0
    rig.route(target(f"unix:{worker.uds}"), model="tiny")
    async with rig.running():
        queue = rig.app.router.queue("tiny")
        before = worker.metric("prompt_tokens_total")
        one = await rig.post(completion(1), "/v1/completions")
        size = one.json()["usage"]["prompt_tokens"]
        # So long that none ends, which would let the next one in, before all have left.
        tasks = [
            asyncio.create_task(rig.post(completion(700), "/v1/completions", timeout=250)) for _ in range(20)
        ]
        await until(lambda: queue.waiting >= 20 - ROWS - 1)
        reached = before + size * (1 + 20 - queue.waiting)
        await until(lambda: worker.metric("prompt_tokens_total") == reached)
        for task in tasks:
            task.cancel()
        await until(lambda: queue.waiting == 0)
        await until(lambda: not worker.busy())
        assert worker.metric("prompt_tokens_total") == reached
