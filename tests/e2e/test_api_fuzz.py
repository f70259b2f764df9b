"""Whatever the served description allows or forbids, and whoever answers: never a failure of the server, and
never an answer that the description doesn't know.

PAGEFLEET_FUZZ_EXAMPLES=1000 looks further.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from tests.conformance.conftest import free_port, served
from tests.worker.fake_engine import MODEL, POOLING_INFO, FakeEngine, make_state
from worker.server.lifecycle import HttpServer, uvicorn_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

EXAMPLES = int(os.environ.get("PAGEFLEET_FUZZ_EXAMPLES", "8"))
SECONDS = 60.0  # for one answer
EMBEDDER = "vectors"
LEFT_OUT = {"/admin/drain", "/admin/names"}  # which would end what others test


class Worker:
    """A real server over a scripted engine, in a thread of its own."""

    def __init__(self, name: str, **engine: Any) -> None:
        self.engine = FakeEngine(per_step=8, **engine)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = HttpServer(uvicorn_config(make_state(self.engine, served_model_name=name)))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    started = [Worker(MODEL), Worker(EMBEDDER, info=POOLING_INFO)]
    yield started
    for worker in started:
        worker.stop()


@pytest.fixture(scope="module")
def gateway(workers: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("gateway")
    names = (MODEL, EMBEDDER)
    (folder / "none.gguf").touch()
    fleet = {
        "supervisor": {"state_dir": str(folder / "state")},
        "models": [{"name": name, "source": str(folder / "none.gguf")} for name in names],
    }
    (folder / "fleet.yaml").write_text(json.dumps(fleet))
    targets = [Target(slot="bytes-0", generation=0, address=worker.url, state="ready") for worker in workers]
    models = {name: Routes(model=name, epoch=1, targets=(target,)) for name, target in zip(names, targets)}
    write_routes(folder / "routes.json", RoutesFile(epoch=1, models=models))
    arguments = ["--config", str(folder / "fleet.yaml"), "--routes", str(folder / "routes.json")]
    with served("gateway", arguments, free_port(), folder / "log") as process:
        yield process.url


def fuzz(url: str, model: str, left_out: set[str]) -> set[str]:
    """Asks every path of the description at `url`; those that were asked."""
    import schemathesis  # here, since every process of a run imports this file, and one runs it

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    asked = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in left_out:
            continue
        asked.add(operation.path)
        fuzz_operation(operation, url, model)
    return asked


def fuzz_operation(operation: Any, url: str, model: str) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conforms = (
        not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance,
    )  # fmt: skip
    takes_model = "model" in str(operation.body)
    examples = EXAMPLES if operation.body else max(2, EXAMPLES // 5)

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if takes_model and isinstance(case.body, dict):
            case.body["model"] = model  # else nearly all would be 404
        response = case.call(base_url=url, timeout=SECONDS)
        case.validate_response(response, checks=list(conforms))

    ask()


def test_worker(workers: list[Worker]) -> None:
    asked = fuzz(workers[0].url, MODEL, LEFT_OUT)
    assert len(asked) > 15
    assert workers[0].engine.in_flight == 0


def test_embeddings_of_a_worker_that_makes_them(workers: list[Worker]) -> None:
    schema = httpx.get(f"{workers[1].url}/openapi.json", timeout=SECONDS).json()
    fuzz(workers[1].url, EMBEDDER, set(schema["paths"]) - {"/v1/embeddings"})
    assert workers[1].engine.submitted


def test_gateway(workers: list[Worker], gateway: str) -> None:
    asked = fuzz(gateway, MODEL, set())
    assert "/admin/abort" not in asked
    assert {"/v1/chat/completions", "/v1/embeddings", "/metrics/workers", "/ready"} <= asked


def test_the_gateway_says_what_the_worker_says_and_what_it_adds(workers: list[Worker], gateway: str) -> None:
    theirs = httpx.get(f"{workers[0].url}/openapi.json", timeout=SECONDS).json()
    ours = httpx.get(f"{gateway}/openapi.json", timeout=SECONDS).json()
    chat = "/v1/chat/completions"
    assert ours["paths"][chat]["post"]["requestBody"] == theirs["paths"][chat]["post"]["requestBody"]
    assert set(theirs["paths"][chat]["post"]["responses"]) < set(ours["paths"][chat]["post"]["responses"])
    schemas, all_schemas = ours["components"]["schemas"], theirs["components"]["schemas"]
    assert schemas == {name: schema for name, schema in all_schemas.items() if name in schemas}
    own = {"AbortRequest", "Aborted", "Draining", "Health", "NamesRequest", "Readiness", "Reset", "Times"}
    assert set(all_schemas) - set(schemas) == own | {"Usage", "UsageReport", "WhoAmI"}
    assert "503" in ours["paths"]["/openapi.json"]["get"]["responses"]
    assert httpx.post(f"{gateway}/openapi.json", timeout=SECONDS).status_code == 405
