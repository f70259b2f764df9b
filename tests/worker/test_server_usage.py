"""What a worker tells its gateway about the tokens of each request, whatever became of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from contracts.headers import USAGE
from contracts.usage import MAX_IDS, Usage, parse_usage
from tests.worker.fake_engine import MODEL, FakeEngine, events, eventually, in_process, make_state, serving
from worker.ipc.messages import RequestOutput
from worker.server.state import ServerState
from worker.server.usage import Account, UsageBook

LONG = [65] * 400
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3}),
    ("/v1/completions", {"prompt": "Hi there, how are you today?", "max_tokens": 9}),
    ("/v1/completions", {"prompt": ["Hi", "Hello"], "n": 2, "max_tokens": 5}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 20, "stop": ["wor"]}),
    ("/generate", {"prompt": "Hi"}),
]


async def ask(url: str, name: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.get(f"{url}/internal/usage/{name}")


async def usage_of(url: str, name: str) -> Usage:
    """The usage of one request, which must have ended."""
    (report,) = (await ask(url, name)).json()
    assert report["state"] == "ended"
    return Usage(**report["usage"])


def counted(body: dict[str, Any], reason: str) -> Usage:
    usage = body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, reason)


@pytest.mark.parametrize(("path", "fields"), ROUTES)
async def test_a_whole_answer_has_its_usage_in_a_header(path: str, fields: dict[str, Any]) -> None:
    async with in_process(make_state()) as client:
        body = {"model": MODEL, **fields}
        asked = await client.post(path, json=body, headers={USAGE: "g-1"})
        unasked = await client.post(path, json=body)
        kept = (await client.get("/internal/usage/g-1")).json()
    reasons = {choice["finish_reason"] for choice in asked.json().get("choices", [asked.json()])}
    expected = counted(asked.json(), "length" if "length" in reasons else "stop")
    assert parse_usage(asked.headers[USAGE].encode()) == expected
    assert Usage(**kept[0]["usage"]) == expected
    assert USAGE not in unasked.headers


@pytest.mark.parametrize(("path", "fields"), ROUTES)
async def test_a_streams_usage_is_kept(path: str, fields: dict[str, Any]) -> None:
    """Also without include_usage; the stream is the same as for somebody who doesn't ask."""
    path = path.replace("/generate", "/generate_stream")
    body = {"model": MODEL, **fields, "stream": True}
    whole_body = {**body, "stream": False}
    async with serving(make_state()) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        asked = await client.post(path, json=body, headers={USAGE: "g-1"})
        unasked = await client.post(path, json=body)
        whole = await client.post(path.replace("_stream", ""), json=whole_body)
        kept = await usage_of(url, "g-1")
    assert USAGE not in asked.headers
    assert [without_ids(line) for line in asked.text.splitlines()] == [
        without_ids(line) for line in unasked.text.splitlines()
    ]
    assert kept == counted(whole.json(), kept.finish_reason)
    assert kept.finish_reason in ("stop", "length")


def without_ids(line: str) -> Any:
    if not line or line == "data: [DONE]":
        return line
    return {**json.loads(line.removeprefix("data: ")), "id": "", "created": 0}


async def test_usage_of_an_answer_that_is_refused_is_nothing() -> None:
    async with in_process(make_state()) as client:
        answer = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": ""}, headers={USAGE: "g-1"}
        )
        assert answer.status_code == 400
        assert parse_usage(answer.headers[USAGE].encode()) == Usage()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answers", [1, 3])
async def test_an_abandoned_request_counts_what_was_generated(stream: bool, answers: int) -> None:
    engine = FakeEngine(lambda request: list(LONG), step_seconds=0.02)
    state = make_state(engine)
    fields = {"prompt": "Hi", "max_tokens": 400, "stream": stream, "n": answers}
    async with serving(state) as url:
        await hang_up(url, fields, lambda: engine.generated > 7)
        usage = await usage_of(url, "g-1")
        assert engine.in_flight == 0
        assert usage == Usage(2, engine.generated, 0, "abort")
        assert usage.completion_tokens > 7


async def hang_up(url: str, fields: dict[str, Any], when: Any, name: str = "g-1") -> None:
    host = httpx.URL(url)
    _, writer = await asyncio.open_connection(host.host, host.port)
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{USAGE}: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    await eventually(when)
    writer.close()


async def test_the_engines_last_words_about_an_aborted_request_count() -> None:
    """It goes on until it hears of the abort, and the question waits for that."""
    engine = SlowToStop(lambda request: list(LONG), paused=True)
    async with serving(make_state(engine)) as url:
        await hang_up(url, {"prompt": "Hi", "max_tokens": 400}, lambda: engine.submitted)
        await eventually(lambda: engine.aborted)
        (report,) = (await ask(url, "g-1")).json()
        assert report["state"] == "running"
        asking = asyncio.create_task(usage_of(url, "g-1"))
        await asyncio.sleep(0.05)
        engine.stop(generated=5)
        assert await asking == Usage(2, 5, 0, "abort")


class SlowToStop(FakeEngine):
    """Hears of aborts late, as an engine in the middle of a step does."""

    def abort(self, request_id: str) -> None:
        _, self.stream, _ = self._running.pop(request_id)
        self.aborted.append(request_id)
        self.stream.leave(RequestOutput(request_id, [], finish_reason="abort"))

    def stop(self, generated: int) -> None:
        self.stream.put(RequestOutput("x", [65] * generated))
        self.stream.put(RequestOutput("x", [], finish_reason="abort"))


async def test_an_engine_that_dies_leaves_what_it_had_generated() -> None:
    engine = FakeEngine(lambda request: list(LONG), step_seconds=0.02)
    async with serving(make_state(engine)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 400}
        answer = asyncio.create_task(client.post("/v1/completions", json=body, headers={USAGE: "g-1"}))
        await eventually(lambda: engine.generated > 4)
        engine.die()
        failed = await answer
        assert failed.status_code == 500
        assert parse_usage(failed.headers[USAGE].encode()) == Usage(2, engine.generated, 0, "error")


async def test_an_operators_abort_counts_too() -> None:
    engine = FakeEngine(lambda request: list(LONG), step_seconds=0.02)
    async with serving(make_state(engine)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 400, "stream": True}
        answer = asyncio.create_task(client.post("/v1/completions", json=body, headers={USAGE: "g-1"}))
        await eventually(lambda: engine.generated > 4)
        await client.post("/admin/abort")
        assert events((await answer).text)[-1]["error"]["code"] == "request_aborted"
        assert await usage_of(url, "g-1") == Usage(2, engine.generated, 0, "abort")


async def test_several_are_asked_about_at_once() -> None:
    async with serving(make_state()) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number in (1, 2):
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": number}
            await client.post("/v1/completions", json=body, headers={USAGE: f"g-{number}"})
        reports = (await ask(url, "g-2,nobody,g-1")).json()
        assert [report["state"] for report in reports] == ["ended", "unknown", "ended"]
        assert [report["usage"]["completion_tokens"] for report in reports] == [2, 0, 1]
        unknown = await ask(url, "nobody")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "usage_unknown")
        assert (await ask(url, ",".join(["g-1"] * (MAX_IDS + 1)))).status_code == 400


async def test_only_this_machine_may_ask() -> None:
    state = make_state()
    async with in_process(state, client=("10.0.0.1", 1)) as client:
        await client.post("/generate", json={"model": MODEL, "prompt": "Hi"}, headers={USAGE: "g-1"})
        assert (await client.get("/internal/usage/g-1")).json()["error"]["code"] == "route_not_found"


async def test_who_doesnt_ask_leaves_nothing() -> None:
    state: ServerState = make_state()
    async with in_process(state) as client:
        await client.post("/generate", json={"model": MODEL, "prompt": "Hi"})
        await client.get("/health", headers={USAGE: "g-1"})
    assert len(state.usage) == 0


async def test_the_book_forgets_the_oldest() -> None:
    book = UsageBook(kept=2)
    for name in "abc":
        account = Account()
        book.begin(name, account)
        book.end(name, account)
    reports = await book.report("abc", wait=0)
    assert [report.state for report in reports] == ["unknown", "ended", "ended"]
    assert len(book) == 2
