"""Traces of a whole fleet: through a gateway process, a worker's server, and its engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.otlp_collector import Collector, Received, collector
from tests.worker.random_models import write_byte_bpe, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
STAGES = ["queue", "prefill", "decode"]
SECRET = "a-prompt-nobody-may-read"
USER = "somebody-with-a-name"


@pytest.fixture(scope="module")
def received() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, received: Collector) -> Iterator[str]:
    """A fleet of two gateway processes and a small model, which sends its spans to the collector."""
    folder = tmp_path_factory.mktemp("fleet")
    write_checkpoint(folder / "model", "qwen2", SHAPE, write_byte_bpe(folder / "model"))
    worker = {"device": "cpu", "threads": 1, "max_model_len": 8192, "kv_cache_memory_bytes": "16MiB"}
    fleet = {
        "gateway": {"port": 0, "processes": 2, "tracing": {"endpoint": received.url}},
        "supervisor": {"state_dir": str(folder / "state")},
        "models": [{"name": "tiny", "source": "model", "worker": worker}],
    }
    file = folder / "fleet.yaml"
    file.write_text(json.dumps(fleet))
    quick = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "300"}  # ms between two batches
    command = [sys.executable, "-m", "gateway.cli", "up", str(file)]
    process = subprocess.Popen(command, env=quick, stdout=subprocess.PIPE, text=True)
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if "Ctrl-C stops it" in line:
            break
    try:
        assert "pagefleet is up at " in output, output
        yield output.partition("pagefleet is up at ")[2].split()[0]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
        logs = "".join(path.read_text() for path in (folder / "state" / "logs").iterdir())
        assert "Traceback" not in logs
    finally:
        process.kill()
        process.wait()
    # Everything that any process sent, its last spans included.
    sent = b"".join(received.bodies)
    assert b"pagefleet.request_id" in sent
    assert SECRET.encode() not in sent
    assert USER.encode() not in sent


def ask(url: str, traceparent: str | None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 8, "ignore_eos": True, "user": USER, **fields}
    headers = {"x-request-id": "r-1", "x-user-id": USER}
    if traceparent is not None:
        headers |= {"traceparent": traceparent, "tracestate": "vendor=1"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=100)


def one(spans: list[Received], name: str, service: str) -> Received:
    (span,) = [s for s in spans if s.name == name and s.resource["service.name"] == f"pagefleet-{service}"]
    return span


def check_request(spans: list[Received], caller: str) -> tuple[Received, Received]:
    """The gateway's span and the worker's, each the other's place in the trace checked."""
    gateway = one(spans, "POST /v1/completions", "gateway")
    worker = one(spans, "POST /v1/completions", "worker")
    assert gateway.parent_id == caller
    assert worker.parent_id == gateway.span_id
    assert gateway.start <= worker.start
    return gateway, worker


def check_stages(spans: list[Received], worker: Received) -> None:
    """Queue, prefill and decode follow each other within the request."""
    queue, prefill, decode = (one(spans, name, "worker") for name in STAGES)
    assert {span.parent_id for span in (queue, prefill, decode)} == {worker.span_id}
    assert worker.start <= queue.start <= queue.end == prefill.start <= prefill.end == decode.start
    assert decode.start <= decode.end <= worker.end


def test_a_callers_trace_goes_through_all(url: str, received: Collector) -> None:
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = ask(url, f"00-{trace}-{caller}-01")
    assert answer.status_code == 200
    spans = received.wait_for(5, trace)
    gateway, worker = check_request(spans, caller)
    check_stages(spans, worker)
    assert len(spans) == 5
    usage = answer.json()["usage"]
    _, prefill, decode = (one(spans, name, "worker") for name in STAGES)
    assert prefill.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert decode.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert decode.attributes["gen_ai.response.finish_reasons"] == ["length"]
    for span in (gateway, worker):
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["pagefleet.request_id"] == "r-1"
        assert span.attributes["gen_ai.request.model"] == "tiny"
        assert not span.failed
    assert gateway.attributes["pagefleet.target"] == "tiny-0.1"
    assert gateway.resource["service.instance.id"] in ("gateway0.1", "gateway1.1")
    assert worker.resource["service.instance.id"] == "tiny-0.1"


@pytest.mark.parametrize("traceparent", [None, "00-0-0-01", "ff-" + "1" * 32 + "-" + "2" * 16 + "-01"])
def test_a_request_without_a_usable_trace_begins_one(
    url: str, received: Collector, traceparent: str | None
) -> None:
    before = {span.trace_id for span in received.spans}
    assert ask(url, traceparent, stream=True).status_code == 200
    deadline = time.monotonic() + 60
    while len(new := [span for span in received.spans if span.trace_id not in before]) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len({span.trace_id for span in new}) == 1
    _, worker = check_request(new, caller="")
    check_stages(new, worker)


def test_each_answer_has_its_stages(url: str, received: Collector) -> None:
    trace = "a" * 32
    assert ask(url, f"00-{trace}-{'1' * 16}-01", n=3, temperature=1.0).status_code == 200
    spans = received.wait_for(11, trace)
    for stage in STAGES:
        choices = [span.attributes["pagefleet.choice"] for span in spans if span.name == stage]
        assert sorted(choices) == [0, 1, 2]


def test_a_caller_who_does_not_sample_is_heard(url: str, received: Collector) -> None:
    assert ask(url, f"00-{'b' * 32}-{'1' * 16}-00").status_code == 200
    assert ask(url, f"00-{'c' * 32}-{'1' * 16}-01").status_code == 200
    received.wait_for(5, "c" * 32)
    assert received.of("b" * 32) == []


def test_refusals_and_clients_that_leave(url: str, received: Collector) -> None:
    assert ask(url, f"00-{'d' * 32}-{'1' * 16}-01", model="none").status_code == 404
    assert ask(url, f"00-{'e' * 32}-{'1' * 16}-01", temperature=9).status_code == 400
    (refused,) = received.wait_for(1, "d" * 32)
    assert refused.attributes["http.response.status_code"] == 404
    assert "gen_ai.request.model" not in refused.attributes
    gateway, worker = received.wait_for(2, "e" * 32)
    assert gateway.attributes["http.response.status_code"] == 400
    assert worker.attributes["http.response.status_code"] == 400

    headers = {"traceparent": f"00-{'f' * 32}-{'1' * 16}-01"}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=100) as stream:
        for _ in stream.iter_lines():
            break
    spans = received.wait_for(5, "f" * 32)
    gateway, worker = check_request(spans, "1" * 16)
    assert gateway.attributes["http.response.status_code"] == 499
    assert worker.attributes["http.response.status_code"] == 499
    decode = one(spans, "decode", "worker")
    assert decode.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 1 <= decode.attributes["gen_ai.usage.output_tokens"] < 8000


def test_a_collector_that_fails_hurts_no_request(url: str, received: Collector) -> None:
    received.status, received.delay = 503, 1.0
    try:
        for number in range(20):
            began = time.monotonic()
            assert ask(url, f"00-{number + 1:032x}-{'1' * 16}-01", max_tokens=1).status_code == 200
            assert time.monotonic() - began < 20
    finally:
        received.status, received.delay = 200, 0.0
    assert ask(url, f"00-{'9' * 32}-{'1' * 16}-01").status_code == 200
    received.wait_for(5, "9" * 32)
