"""The whole worker with the demo model: real engine, real tokens, real deaths."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.worker.fake_engine import events

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


class Worker:
    def __init__(self, model: Path, uds: Path) -> None:
        self.uds = uds
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worker", "--model", str(model), "--served-model-name", "smol"),
                *("--uds", str(uds), "--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB"),
                *("--threads", "1"),  # one, so that a busy machine doesn't make threads wait for each other
            ]
        )
        transport = httpx.HTTPTransport(uds=str(uds))
        self.client = httpx.Client(transport=transport, base_url="http://worker", timeout=300)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the worker has ended"
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        pytest.fail("the worker did not become ready")

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"pagefleet_{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    def chat(self, **fields: Any) -> httpx.Response:
        answer = self.client.post("/v1/chat/completions", json={"model": "smol", "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(scope="module")
def worker(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    started = Worker(demo_model, tmp_path_factory.mktemp("worker") / "w.sock")
    try:
        started.wait_ready()
        yield started
    finally:
        started.client.close()
        started.process.kill()
        started.process.wait()


def test_greedy_answers_are_the_reference(worker: Worker, reference_tokens: Path) -> None:
    prompt = json.loads(reference_tokens.read_text())["prompts"][0]
    fields = {"messages": prompt["messages"], "max_tokens": 12}
    body = worker.chat(**fields, logprobs=True, top_logprobs=1).json()
    text = body["choices"][0]["message"]["content"]
    assert prompt["text_to_eos"].startswith(text)
    assert body["usage"]["prompt_tokens"] == len(prompt["prompt_ids"])
    assert body["usage"]["completion_tokens"] == 12
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == text
    assert all(token["token"] == token["top_logprobs"][0]["token"] for token in content)
    chunks = events(worker.chat(**fields, stream=True, stream_options={"include_usage": True}).text)
    assert chunks[-1] == "[DONE]"
    pieces = [choice["delta"].get("content", "") for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert "".join(pieces) == text
    # The same prompt again: all its full pages come from the cache.
    assert (
        chunks[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt["prompt_ids"]) // 16 * 16
    )
    by_ids = {"model": "smol", "prompt": prompt["prompt_ids"], "max_tokens": 12, "temperature": 0}
    assert worker.client.post("/generate", json=by_ids).json()["token_ids"] == prompt["greedy_ids"][:12]


def test_a_client_that_leaves_stops_the_engine(worker: Worker) -> None:
    fields = {"model": "smol", "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    before = worker.metric("generation_tokens_total")
    with worker.client.stream("POST", "/v1/completions", json={**fields, "n": 4}) as answer:
        next(answer.iter_bytes())
    deadline = time.monotonic() + 60
    while worker.metric("num_requests_running") or worker.metric("kv_cache_usage_ratio"):
        assert time.monotonic() < deadline, "the engine goes on for a client that has left"
        time.sleep(0.1)
    assert worker.metric("generation_tokens_total") - before < 1600


def test_death_of_the_engine_process(worker: Worker) -> None:
    (engine,) = psutil.Process(worker.process.pid).children()
    fields = {"model": "smol", "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with worker.client.stream("POST", "/v1/completions", json=fields) as answer:
        received = answer.iter_text()
        text = next(received)
        engine.kill()
        text += "".join(received)
    assert events(text)[-1]["error"]["code"] == "engine_dead"
    assert worker.process.wait(60) == 1
    assert not worker.uds.exists()
