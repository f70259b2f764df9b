"""Health, readiness, metrics, identity and the operator's routes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worker.fake_engine import INFO, MODEL, FakeEngine, in_process, make_state
from worker.config import WorkerConfig
from worker.ipc.messages import EngineRequest, EngineStats, Progress
from worker.params import SamplingParams
from worker.server.state import ServerState


async def get(state: ServerState, path: str) -> tuple[int, Any]:
    async with in_process(state) as client:
        answer = await client.get(path)
    return answer.status_code, answer.json()


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "model_name" in sample.labels:
                assert sample.labels["model_name"] == MODEL
            reason = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                found[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return found


async def test_readiness_follows_loading() -> None:
    state = ServerState(WorkerConfig(model="m", served_model_name=(MODEL,)))
    status, body = await get(state, "/ready")
    assert (status, body["status"], body["phase"]) == (503, "loading", "start")
    assert (await get(state, "/health"))[0] == 200
    async with in_process(state) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        assert answer.headers["retry-after"]
    state.engine = engine = FakeEngine(state="loading", info=None, progress=Progress("weights", 3, 10))
    status, body = await get(state, "/ready")
    assert (status, body["phase"], body["done"], body["total"]) == (503, "weights", 3, 10)
    engine.state = "ready"
    assert (await get(state, "/ready"))[0] == 503, "the text side is not there yet"
    ready = {"status": "ready", "phase": "ready", "done": 0, "total": 0, "model": MODEL, "inflight": 0}
    assert (await get(make_state(), "/ready")) == (200, ready)
    engine.state, engine.failure = "dead", "out of memory"
    status, body = await get(state, "/ready")
    assert (status, body["status"], body["message"]) == (503, "failed", "out of memory")


async def test_health_is_about_progress_not_about_load() -> None:
    engine = FakeEngine(paused=True)
    state = make_state(engine, stall_limit=30)
    engine.last_message = time.monotonic() - 3600
    assert (await get(state, "/health"))[0] == 200, "idle for an hour is healthy"
    state.admit(object(), 1)  # type: ignore[arg-type]
    engine.submit(EngineRequest("a", [1], SamplingParams(), seed=0))
    assert (await get(state, "/health"))[0] == 200, "new work after a long idle time is healthy"
    state._busy_since = time.monotonic() - 31
    status, body = await get(state, "/health")
    assert (status, body["error"]["code"]) == (503, "engine_stalled")
    engine.last_message = time.monotonic()
    assert (await get(state, "/health"))[0] == 200, "a step was taken"
    assert (await get(state, "/health"))[1] == {
        "status": "ok",
        "engine": "ready",
        "draining": False,
        "inflight": 0,
        "max_num_seqs": INFO.max_num_seqs,
    }
    with state.gate:
        assert (await get(state, "/health"))[1]["inflight"] == 1
    state.gate.draining = True
    assert (await get(state, "/health"))[1]["draining"]


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


async def test_a_cpu_engine_that_computes_is_busy_and_one_that_waits_hangs(
    spinning: subprocess.Popen[bytes],
) -> None:
    """A step of a large model on a CPU may take minutes; an engine that hangs uses no processor time."""
    engine = FakeEngine(paused=True, pid=spinning.pid)
    state = make_state(engine, stall_limit=30)
    state.admit(object(), 1)  # type: ignore[arg-type]
    engine.submit(EngineRequest("a", [1], SamplingParams(), seed=0))
    engine.last_message = state._busy_since = time.monotonic() - 60

    async def status_is(expected: int) -> None:
        async with asyncio.timeout(30):
            while (await get(state, "/health"))[0] != expected:
                await asyncio.sleep(0.2)

    await status_is(200)
    spinning.send_signal(signal.SIGSTOP)
    await status_is(503)
    spinning.send_signal(signal.SIGCONT)
    await status_is(200)
    engine.last_message = state._busy_since = time.monotonic() - 301
    assert (await get(state, "/health"))[0] == 503, "also an endless loop ends"


async def test_models_lists_every_served_name() -> None:
    state = make_state(served_model_name=("a", "org/b"))
    _, body = await get(state, "/v1/models")
    assert [card["id"] for card in body["data"]] == ["a", "org/b"]
    assert body["data"][0]["max_model_len"] == 512
    status, card = await get(state, "/v1/models/org/b")
    assert (status, card["id"], card["object"]) == (200, "org/b", "model")


async def test_whoami_and_version() -> None:
    _, body = await get(make_state(generation=4), "/internal/whoami")
    assert body | {"pid": 0} == {"slot": "bytes-0", "generation": 4, "model": MODEL, "pid": 0}
    assert body["pid"] > 1
    _, version = await get(make_state(), "/version")
    assert version["version"]


@pytest.mark.parametrize("path", ["drain", "undrain", "abort", "reset_prefix_cache"])
@pytest.mark.parametrize(
    ("peer", "allowed"), [("127.0.0.1", True), ("::1", True), ("10.0.0.9", False), ("127.0.0.1.evil", False)]
)
async def test_admin_is_for_this_machine_only(path: str, peer: str, allowed: bool) -> None:
    state = make_state()
    async with in_process(state, (peer, 999)) as client:
        headers = {"x-forwarded-for": "127.0.0.1"}
        answer = await client.post(f"/admin/{path}", headers=headers)
    assert answer.status_code == (200 if allowed else 404)
    assert state.gate.draining == (allowed and path == "drain")


async def test_admin_is_not_for_pages_in_a_browser() -> None:
    state = make_state()
    async with in_process(state) as client:
        answer = await client.post("/admin/drain", headers={"origin": "https://example.com"})
    assert answer.status_code == 404
    assert not state.gate.draining


async def test_names_can_be_given_anew_while_it_serves() -> None:
    state = make_state()
    async with in_process(state) as client:

        async def status(name: str) -> int:
            return (await client.post("/v1/completions", json={"model": name, "prompt": "x"})).status_code

        assert (await status(MODEL), await status("nick")) == (200, 404)
        answer = await client.post("/admin/names", json={"names": [MODEL, "nick"]})
        assert (answer.status_code, answer.json()) == (200, {"names": [MODEL, "nick"]})
        assert (await status(MODEL), await status("nick")) == (200, 200)
        models = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == [MODEL, "nick"]
        for wrong in ({"names": []}, {"names": ["nick", MODEL]}, {"names": "nick"}, {}):
            assert (await client.post("/admin/names", json=wrong)).status_code == 400
        assert await status("nick") == 200


async def test_reset_prefix_cache_reaches_the_engine() -> None:
    engine = FakeEngine()
    async with in_process(make_state(engine)) as client:
        assert (await client.post("/admin/reset_prefix_cache")).json() == {"reset": True}
    assert engine.calls == ["reset_prefix_cache"]


async def test_metrics_count_what_happened() -> None:
    engine = FakeEngine()
    engine.stats = EngineStats(
        steps=9, running=2, waiting=3, pages_total=64, pages_used=16, slots_taken=200, slots_filled=150,
        preemptions=1, prefix_queries=100, prefix_hits=25, prompt_tokens=1000, generation_tokens=500,
    )  # fmt: skip
    state = make_state(engine)
    async with in_process(state) as client:
        for fields in ({}, {"max_tokens": 3}, {"n": 2, "max_tokens": 3}):
            await client.post("/v1/completions", json={"model": MODEL, "prompt": "secret", **fields})
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "secret" not in answer.text
    found = samples(answer.text)
    expected = {
        "pagefleet_num_requests_running": 2,
        "pagefleet_num_requests_waiting": 3,
        "pagefleet_kv_cache_usage_ratio": 0.25,
        "pagefleet_kv_cache_waste_ratio": 0.25,
        "pagefleet_prefix_cache_queries_total": 100,
        "pagefleet_prefix_cache_hits_total": 25,
        "pagefleet_num_preemptions_total": 1,
        "pagefleet_prompt_tokens_total": 1000,
        "pagefleet_generation_tokens_total": 500,
        "pagefleet_request_success_total/stop": 1,
        "pagefleet_request_success_total/length": 3,
        "pagefleet_request_success_total/error": 0,
        "pagefleet_time_to_first_token_seconds_count": 4,
        "pagefleet_request_queue_time_seconds_count": 4,
        "pagefleet_e2e_request_latency_seconds_count": 4,
        "pagefleet_inter_token_latency_seconds_count": 13 + 3 * 2,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["pagefleet_inter_token_latency_seconds_sum"] < 60


async def test_metrics_before_there_is_an_engine() -> None:
    state = ServerState(WorkerConfig(model="m", served_model_name=(MODEL,)))
    async with in_process(state) as client:
        found = samples((await client.get("/metrics")).text)
    assert found["pagefleet_num_requests_running"] == 0
