"""Requests that say how long they may wait before they are begun."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.fake_engine import MODEL, POOLING_INFO, FakeEngine, events, in_process, make_state
from tests.worker.random_models import SMALL
from worker.engine.loop import Engine
from worker.ipc.messages import EngineRequest, RequestOutput
from worker.llm import LLM
from worker.params import SamplingParams


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A random model that answers one request at a time."""
    shape = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 100, **SMALL}
    shape |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "eos_token_id": 0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    with LLM(f"random:{path}", device="cpu", threads=1, max_num_seqs=1, num_gpu_blocks_override=64) as llm:
        yield llm._engine


def ask(engine: Engine, name: str, tokens: int, deadline: float) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    now = time.monotonic()
    engine.add(EngineRequest(name, [1, 2, 3], params, 0, arrival=now, deadline=deadline and now + deadline))


def test_the_engine_ends_what_has_not_begun_in_time(engine: Engine) -> None:
    ask(engine, "first", 400, deadline=0.3)  # it has begun by then, and goes on for longer
    engine.step()
    ask(engine, "late", 2, deadline=0.05)
    ask(engine, "patient", 2, deadline=0.0)
    ask(engine, "past", 2, deadline=-0.5)  # what a request needs before the engine has it may take too long
    last: dict[str, RequestOutput] = {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step() if output.finish_reason}
        time.sleep(0.001)
    assert {name: output.finish_reason for name, output in last.items()} == {
        "first": "length", "late": "error", "patient": "length", "past": "error",
    }  # fmt: skip
    assert last["late"].late
    assert "waited for 0.05 s" in (last["late"].error or "")
    assert "waited for 0 s" in (last["past"].error or "")
    assert engine.check_integrity() == ""


class LateEngine(FakeEngine):
    """Finds every request with a deadline too late."""

    def step(self) -> None:
        for request_id, (request, stream, _) in list(self._running.items()):
            if request.deadline:
                del self._running[request_id]
                stream.put(RequestOutput(request_id, [], finish_reason="error", error="it waited", late=True))
        super().step()


async def test_inputs_of_embeddings_wait_no_longer_than_that_either() -> None:
    engine = LateEngine(info=POOLING_INFO)
    async with in_process(make_state(engine)) as client:
        body = {"model": MODEL, "input": ["a", "b"]}
        late = await client.post("/v1/embeddings", json=body, headers={"x-request-timeout": "7"})
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert late.headers["x-pagefleet-refused"] == "late"
    assert 0 < engine.submitted[0].deadline - time.monotonic() <= 7
    assert engine.in_flight == 0


async def test_a_late_request_is_a_503_that_may_go_elsewhere() -> None:
    engine = LateEngine()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    async with in_process(make_state(engine)) as client:
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-timeout": "7"})
        stream = await client.post(
            "/v1/chat/completions", json={**body, "stream": True}, headers={"x-request-timeout": "7"}
        )
        for value in ("", "soon", "-1", "0", "nan", "inf"):
            fine = await client.post("/v1/chat/completions", json=body, headers={"x-request-timeout": value})
            assert fine.status_code == 200
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-pagefleet-refused"] == "late"
    assert int(answer.headers["retry-after"]) >= 1
    assert events(stream.text)[-1]["error"]["code"] == "deadline_exceeded"
    given = engine.submitted[0].deadline - time.monotonic()
    assert 0 < given <= 7
    assert engine.submitted[2].deadline == 0
