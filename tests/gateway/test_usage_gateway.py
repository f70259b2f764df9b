"""What a gateway writes down of its requests: each once, with what became of it, and never at their cost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gateway.identity.store import KEYS_FILE, KeyStore
from gateway.usage.record import MAX_BODY
from gateway.usage.store import USAGE_FILE, UsageStore
from tests.gateway.rig import CHAT, Rig, one_worker, until


def audited(folder: Path, **audit: Any) -> dict[str, Any]:
    return {"audit": {"file": str(folder / "audit.jsonl"), **audit}, "usage": True}


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def metric(rig: Rig, name: str, kind: str) -> float:
    page = (await rig.client.get("/metrics")).text
    prefix = f'{name}{{kind="{kind}"}} '
    (line,) = [line for line in page.splitlines() if line.startswith(prefix)]
    return float(line.removeprefix(prefix))


async def test_every_end_of_a_request_is_one_line(tmp_path: Path) -> None:
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        record, key = store.create("alice")
    async with one_worker(tmp_path, auth={"mode": "keys"}, **audited(tmp_path)) as rig:
        good = {"authorization": f"Bearer {key}"}
        statuses = []
        for body, headers in (
            ({"model": "m"}, good),
            ({"model": "m"}, {"authorization": "Bearer pfk_no"}),
            ({"model": "nobody"}, good),
            ({"model": "idle"}, good),
            ({"model": 7}, good),
            ({"model": "m", "fake": {"do": "status", "status": 400}}, good),
        ):
            answer = await rig.post(body, headers={**headers, "x-request-id": f"id-{len(statuses)}"})
            statuses.append(answer.status_code)
        leaving = asyncio.create_task(rig.post({"model": "m", "fake": {"wait": 30}}, headers=good))
        await until(lambda: len(rig.workers[0].requests) == 3)
        leaving.cancel()
        await rig.idle()
    assert statuses[:5] == [200, 401, 404, 503, 400]
    written = sorted(lines(tmp_path), key=lambda line: line["time"])
    assert [line["status"] for line in written] == [*statuses, 499]
    assert [line["request_id"] for line in written[:6]] == [f"id-{n}" for n in range(6)]
    assert [line.get("code") for line in written[1:5]] == [
        "invalid_api_key",
        "model_not_found",
        "model_starting",
        "invalid_type",
    ]
    served, unknown, *_ = written
    assert (served["user"], served["key_id"], served["model"], served["target"], served["path"]) == (
        "alice",
        record.id,
        "m",
        "s.1",
        CHAT,
    )
    assert 0 <= served["first_token_seconds"] <= served["seconds"] < 30
    assert "user" not in unknown
    assert "first_token_seconds" not in unknown
    assert all("body" not in line for line in written)
    store = UsageStore(tmp_path / USAGE_FILE)
    assert [total[:3] for total in store.totals(("user", "model"))] == [
        (("alice", "idle"), 1, 1),
        (("alice", "m"), 3, 2),
    ]
    store.close()


async def test_who_tries_keys_on_the_list_of_models_is_written_down(tmp_path: Path) -> None:
    KeyStore(tmp_path / KEYS_FILE, create=True, write=True).close()
    async with one_worker(tmp_path, auth={"mode": "keys"}, **audited(tmp_path)) as rig:
        answers = [
            await rig.client.get(path, headers={"x-api-key": "wrong"})
            for path in ("/v1/models", "/v1/models/m")
        ]
        await until(lambda: len(lines(tmp_path)) == 2)
    for line, answer in zip(lines(tmp_path), answers, strict=True):
        assert (line["path"], line["status"], line["code"]) == ("/v1/models", 401, "invalid_api_key")
        assert line["request_id"] == answer.headers["x-request-id"]


async def test_prompts_only_when_asked_for_and_bounded(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **audited(tmp_path, prompts=True)) as rig:
        await rig.post({"model": "m", "messages": [{"role": "user", "content": "naïve"}]})
        await rig.post({"model": "m", "prompt": "x" * 100_000})
    short, long = lines(tmp_path)
    assert json.loads(short["body"])["messages"][0]["content"] == "naïve"
    assert len(long["body"]) == MAX_BODY


async def test_a_file_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    (tmp_path / USAGE_FILE).mkdir()
    async with one_worker(tmp_path, **audited(tmp_path)) as rig:
        for _ in range(20):
            assert (await rig.post()).status_code == 200
        failures = "pagefleet_gateway_record_failures_total"
        async with asyncio.timeout(20):
            while await metric(rig, failures, "audit") < 2 or await metric(rig, failures, "usage") < 2:
                await asyncio.sleep(0.05)
        assert await metric(rig, "pagefleet_gateway_records_lost_total", "audit") == 0
        assert (await rig.post()).status_code == 200


async def test_nothing_is_written_where_nobody_wants_it(tmp_path: Path) -> None:
    async with one_worker(tmp_path, usage=False) as rig:
        assert (await rig.post()).status_code == 200
        assert "x-pagefleet-usage" not in rig.workers[0].requests[0].headers
    assert not (tmp_path / USAGE_FILE).exists()


async def test_streams_are_written_when_their_worker_has_said_what_they_used(tmp_path: Path) -> None:
    """This worker doesn't know: the line comes all the same."""
    async with one_worker(tmp_path, **audited(tmp_path)) as rig:
        answer = await rig.ask(stream=True, do="sse", chunks=3, delay=0.05)
        assert answer.status_code == 200
        await until(lambda: lines(tmp_path), 30)
    (line,) = lines(tmp_path)
    assert line["first_token_seconds"] < line["seconds"]
