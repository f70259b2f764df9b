from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.fleet.state import Target
from tests.gateway.rig import CHAT, Rig, error_of, one_worker, target, until


async def test_models_are_listed_with_aliases_whether_ready_or_not(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        answer = (await rig.client.get("/v1/models")).json()
        assert answer["object"] == "list"
        assert [(card["id"], card["root"]) for card in answer["data"]] == [
            ("m", "m"),
            ("nick", "m"),
            ("idle", "idle"),
        ]
        for card in answer["data"]:
            assert (await rig.client.get(f"/v1/models/{card['id']}")).json() == card
        missing = await rig.client.get("/v1/models/who%2Fknows")
        assert missing.status_code == 404
        assert error_of(missing)["code"] == "model_not_found"
        assert "'who/knows'" in error_of(missing)["message"]


async def test_a_model_id_may_hold_slashes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(model="Org/Model-1")
    async with rig.running():
        for spelling in ("Org/Model-1", "Org%2FModel-1"):
            assert (await rig.client.get(f"/v1/models/{spelling}")).json()["id"] == "Org/Model-1"


async def test_health_ready_version(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        assert (await rig.client.get("/health")).json() == {"status": "ok"}
        assert (await rig.client.get("/version")).json() == {"version": version("pagefleet")}
        response = await rig.client.get("/ready")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["not_ready"] == ["idle"]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        rig.app.router._configured.pop("idle")
        response = await rig.client.get("/ready")
        assert (response.status_code, response.json()) == (200, {"status": "ready", "not_ready": []})


async def test_a_target_that_is_not_ready_does_not_count(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(
        *(target("unix:/nowhere", slot=state, state=state) for state in ("starting", "draining", "down"))
    )
    async with rig.running():
        assert (await rig.client.get("/ready")).json()["not_ready"] == ["m", "idle"]


NOT_THERE = [
    ("GET", "/nope", 404, None),
    ("POST", "/v1/images/generations", 404, None),
    ("POST", "/v1/chat/completions/", 404, None),
    ("POST", "/admin/drain", 404, None),
    ("GET", "/internal/whoami", 404, None),
    ("GET", CHAT, 405, "POST, OPTIONS"),
    ("HEAD", CHAT, 405, "POST, OPTIONS"),
    ("PUT", "/generate", 405, "POST, OPTIONS"),
    ("POST", "/health", 405, "GET, HEAD, OPTIONS"),
    ("DELETE", "/v1/models/m", 405, "GET, HEAD, OPTIONS"),
]


async def test_what_there_is_not(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for method, path, status, allow in NOT_THERE:
            content = b"{}" if method in ("POST", "PUT") else None
            response = await rig.client.request(method, path, content=content)
            assert (method, path, response.status_code) == (method, path, status)
            assert response.headers.get("allow") == allow
            assert response.headers["x-request-id"]
            if method != "HEAD":
                error_of(response)
        assert not rig.workers[0].requests


async def test_head_and_options(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for path in ("/health", "/v1/models", "/v1/models/m", "/metrics"):
            head, get = await rig.client.head(path), await rig.client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
        for path, allow in ((CHAT, "POST, OPTIONS"), ("/health", "GET, HEAD, OPTIONS")):
            options = await rig.client.options(path)
            assert (options.status_code, options.headers["allow"]) == (200, allow)


async def metrics(rig: Rig) -> dict[tuple[str, ...], float]:
    """Sample name and label values, in the order of the labels' names → value."""
    text = (await rig.client.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_metrics(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for _ in range(3):
            await rig.ask()
        await rig.ask(do="status", status=429)
        await rig.post({"model": "secret-model-name"})
        await rig.post({"model": "idle"})
        found = await metrics(rig)
        requests = {
            key[1:]: value for key, value in found.items() if key[0] == "pagefleet_gateway_requests_total"
        }
        assert requests == {
            ("m", "200", "s.1"): 3,
            ("m", "429", "s.1"): 1,
            ("", "404", ""): 1,
            ("idle", "503", ""): 1,
        }
        assert found["pagefleet_gateway_request_seconds_count", "m"] == 4
        assert found["pagefleet_gateway_overhead_seconds_count", "m"] == 4
        assert found["pagefleet_gateway_inflight", "m", "s.1"] == 0
        assert found["pagefleet_route_epoch",] == 1
        assert found["pagefleet_route_weight", "m", "s.1"] == 10_000
        assert not any("secret" in part for key in found for part in key)


async def test_restarts_of_workers_come_from_the_routes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(
        target("unix:/a", slot="m-0", generation=3, restarts=2), target("unix:/b", slot="m-1", state="down")
    )
    async with rig.running():
        found = await metrics(rig)
        assert found["pagefleet_worker_restarts_total", "m", "m-0"] == 2
        assert found["pagefleet_worker_restarts_total", "m", "m-1"] == 0


def worker_page(model: str, tokens: int) -> bytes:
    """Real exposition: every kind of metric, with a label value that holds what separates labels."""
    registry = CollectorRegistry()
    labels = {"labelnames": ["model_name"], "registry": registry}
    Counter("pagefleet_generation_tokens", "Tokens generated.", **labels).labels(model).inc(tokens)
    Gauge("pagefleet_num_requests_running", "Answers, running.", **labels).labels(model).set(2)
    latency = Histogram("pagefleet_time_to_first_token_seconds", "First.", buckets=(0.1, 1), **labels)
    latency.labels(model).observe(0.5)
    Gauge("process_open_fds", "Open files.", registry=registry).set(7)
    return generate_latest(registry)


async def test_metrics_of_all_workers_are_one_page(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    workers = [await rig.worker(f"w{number}") for number in range(5)]
    odd = 'o"d{d},x="y\\'
    workers[0].metrics, workers[1].metrics = worker_page("m", 10), worker_page(odd, 32)
    workers[2].metrics = None  # hangs
    workers[3].metrics = b"this is { no page"
    workers[4].metrics = worker_page("starting", 1)
    rig.route(
        *(target(worker, slot=f"m-{number}") for number, worker in enumerate(workers[:4])),
        target(workers[4], slot="m-4", state="starting"),
        target("unix:/nowhere", slot="m-5"),
    )
    async with rig.running():
        response = await rig.client.get("/metrics/workers")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        lines = response.text.splitlines()
        heads = [line for line in lines if line.startswith("#")]
        assert len(heads) == len(set(heads))
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        tokens = families["pagefleet_generation_tokens"]
        assert (tokens.type, tokens.documentation) == ("counter", "Tokens generated.")
        assert {
            (sample.labels["target"], sample.labels["model_name"]): sample.value for sample in tokens.samples
        } == {("m-0.1", "m"): 10, ("m-1.1", odd): 32}
        buckets = families["pagefleet_time_to_first_token_seconds"]
        assert buckets.type == "histogram"
        assert {
            (sample.labels["target"], sample.labels["le"]): sample.value
            for sample in buckets.samples
            if sample.name.endswith("_bucket")
        } == {(name, le): value for name in ("m-0.1", "m-1.1") for le, value in LE.items()}
        assert {sample.labels["target"] for sample in families["process_open_fds"].samples} == {
            "m-0.1",
            "m-1.1",
        }
        await until(lambda: rig.app.upstream.open_connections == 0)


LE = {"0.1": 0, "1.0": 1, "+Inf": 1}


async def test_overhead_leaves_out_the_workers_time(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        await rig.ask(do="json", wait=0.5)
        found = await metrics(rig)
        seconds = found["pagefleet_gateway_request_seconds_sum", "m"]
        assert 0 < found["pagefleet_gateway_overhead_seconds_sum", "m"] <= seconds - 0.49


async def test_inflight_and_weights_follow_the_routes(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        worker = rig.workers[0]
        async with rig.client.stream(
            "POST", CHAT, json={"model": "m", "fake": {"do": "sse", "stop_at": 1}}
        ) as stream:
            await anext(stream.aiter_raw())
            rig.route(target(worker, weight_bp=0), target(worker, slot="new", weight_bp=10_000))
            rig.app.router.refresh()
            found = await metrics(rig)
            assert found["pagefleet_gateway_inflight", "m", "s.1"] == 1
            assert found["pagefleet_route_epoch",] == 2
            assert found["pagefleet_route_weight", "m", "s.1"] == 0
            assert found["pagefleet_route_weight", "m", "new.1"] == 10_000
        await rig.idle()


async def test_an_error_of_our_own_is_a_500_with_four_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with one_worker(tmp_path) as rig:

        def broken(*args: object) -> Target:
            raise ZeroDivisionError

        monkeypatch.setattr(rig.app.router, "claim", broken)
        response = await rig.post()
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
        assert "ZeroDivisionError" in caplog.text
        monkeypatch.undo()
        assert (await rig.post()).status_code == 200
