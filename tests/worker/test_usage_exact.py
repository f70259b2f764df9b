"""Usage that a whole worker reports, against what its engine counted: equal, whatever happened."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.headers import USAGE
from contracts.usage import Usage, parse_usage
from tests.worker.random_models import SMALL, write_checkpoint, write_sentencepiece
from tests.worker.real_worker import RealWorker, real_worker, wait_until

pytestmark = pytest.mark.timeout(300)

ROUTES = ("/v1/completions", "/generate", "/generate_stream")
REQUESTS = 120


async def ask(client: httpx.AsyncClient, number: int, rng: random.Random) -> Usage | None:
    """One request, which in two of three cases leaves at some moment; the usage in its header, if any."""
    headers = {USAGE: f"g-{number}"}
    if number % 3 == 0:
        return await leave_a_stream(client, headers, rng)
    path = rng.choice(ROUTES)
    fields: dict[str, Any] = {"model": "tiny", "prompt": "hello world, or", "ignore_eos": True}
    fields["max_tokens"] = rng.randrange(1, 120)
    if path.startswith("/v1"):
        fields |= {"stream": rng.random() < 0.5, "n": rng.choice((1, 1, 3))}
    patience = rng.choice((0.005, 0.3, 250, 250))
    try:
        async with asyncio.timeout(patience):
            answer = await client.post(path, json=fields, headers=headers)
    except TimeoutError:
        return None
    assert answer.status_code == 200, answer.text
    return parse_usage(answer.headers.get(USAGE, "").encode())


async def leave_a_stream(client: httpx.AsyncClient, headers: dict[str, str], rng: random.Random) -> None:
    """At its first piece, long before its end."""
    body = {"model": "tiny", "prompt": "hello world", "ignore_eos": True, "max_tokens": 1000, "stream": True}
    path = rng.choice(("/v1/completions", "/generate_stream"))
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        await anext(answer.aiter_bytes())


async def all_usages(worker: RealWorker) -> tuple[list[Usage], int]:
    """What the worker says of all requests, and how many answers said it themselves."""
    rng = random.Random(11)
    async with worker.async_client(max_connections=40) as client:
        told = await asyncio.gather(*(ask(client, number, rng) for number in range(REQUESTS)))
        usages = []
        for start in range(0, REQUESTS, 60):
            names = ",".join(f"g-{number}" for number in range(start, start + 60))
            reports = (await client.get(f"/internal/usage/{names}")).json()
            for number, report in enumerate(reports, start):
                if report["state"] == "unknown":  # it left before its request did
                    continue
                assert report["state"] == "ended"
                usages.append(Usage(**report["usage"]))
                assert told[number] in (None, usages[-1])
    return usages, sum(one is not None for one in told)


def test_the_sum_of_all_usages_is_what_the_engine_generated(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokens = write_sentencepiece(tmp_path / "model")
    write_checkpoint(tmp_path / "model", "llama", SMALL, tokens)
    options = ("--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "16", "--max-waiting", "400")
    with real_worker(tmp_path, tmp_path / "model", *options) as worker:
        usages, in_headers = asyncio.run(all_usages(worker))
        wait_until(lambda: not worker.busy())
        reasons = Counter(usage.finish_reason for usage in usages)
        generated = sum(usage.completion_tokens for usage in usages)
        assert reasons["length"] > 10
        assert reasons["abort"] > 10
        assert in_headers > 5
        assert generated == worker.metric("generation_tokens_total") > 0
        cut = [usage for usage in usages if usage.finish_reason == "abort" and usage.completion_tokens]
        assert cut  # some left in the middle
